"""Private parts of libraries that planning relies on, as of Lightning 2.6, torch 2.13 and transformers 5.17."""

from typing import Any

from lightning.pytorch.cli import LightningCLI
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from transformers import PreTrainedModel


def attention_of(model: PreTrainedModel) -> str:
    """The attention that a model uses now; the public name is that of what it was loaded with."""
    return str(model.config._attn_implementation)


def arguments_of(cli: LightningCLI, subcommand: str) -> dict[str, Any]:
    """The arguments that the command line would call the trainer's method `subcommand` with."""
    return cli._prepare_subcommand_kwargs(subcommand)
