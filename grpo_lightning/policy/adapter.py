"""Adapters: a few trained tensors beside weights that stay as they are."""

import copy
import hashlib
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from grpo_lightning.policy.pretrained import first_line, location
from grpo_lightning.types import UsageError, at_least, require

if TYPE_CHECKING:
    from peft import PeftConfig


class LoRA:
    """Trains two thin matrices beside each linear layer, while the weights stay as they are (LoRA, arXiv 2106.09685).

    A layer computes W x + s B A x (eq. 3) with A of [rank, in], B of [out, rank] and s = alpha / rank. B starts at 0:
    the first policy is the model itself. Gradients, optimizer state and checkpoints shrink to a hundredth or so, and
    the reference costs nothing. Learning rates are about ten times those of all weights: 1e-5 to 3e-4.

    PEFT makes it (`pip install 'grpo-lightning[peft]'`). The matrices are float32 whatever the type of the weights. A
    subclass that overrides `config` trains what else PEFT adds to layers.

    Args:
        rank: Rows of A and columns of B.
        alpha: Numerator of the scale s.
        target_modules: `all-linear` for every linear layer but the head, the names of layers such as
            `[q_proj, v_proj]`, or a regular expression for whole names.
        dora: Also train the norm of every row of W + s B A (DoRA, arXiv 2402.09353). Slower.
        rslora: Take s = alpha / sqrt(rank), so that a large rank learns as fast as a small one (arXiv 2312.03732).
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 32.0,
        target_modules: list[str] | str = "all-linear",
        dora: bool = False,
        rslora: bool = False,
    ) -> None:
        at_least("model.policy.adapter.rank", rank, 1)
        require(alpha > 0, f"model.policy.adapter.alpha={alpha}: give more than 0, such as twice the rank")
        self.rank, self.alpha, self.target_modules = rank, alpha, target_modules
        self.dora, self.rslora = dora, rslora

    def check(self) -> None:
        """Raises UsageError where PEFT is missing."""
        is_there, install = find_spec("peft") is not None, "pip install 'grpo-lightning[peft]'"
        require(is_there, f"model.policy.adapter: it needs peft, which is not installed. {install}")

    def config(self) -> "PeftConfig":
        """The adapter as PEFT describes it."""
        from peft import LoraConfig

        kind: Any = {"lora_alpha": self.alpha, "use_dora": self.dora, "use_rslora": self.rslora}
        return LoraConfig(r=self.rank, target_modules=self.target_modules, task_type="CAUSAL_LM", **kind)

    def add(self, model: PreTrainedModel) -> None:
        """Adds the trained tensors, drawn from the global generator, to the layers of `model`; freezes all else."""
        self.check()
        from peft import inject_adapter_in_model

        key, name = f"model.policy.adapter.target_modules={self.target_modules}", type(model).__name__
        try:
            with warnings.catch_warnings():
                # PEFT finds out that GPT-2's layers are transposed; tied embeddings are refused below.
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to|Model has `tie_word_embeddings=True`")
                inject_adapter_in_model(self.config(), model)
        except ValueError as error:
            raise UsageError(f"{key}: {first_line(error)}. Give all-linear, or names of layers of {name}") from error
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
        if tied and any(layer in embeddings for layer in adapted_layers(model).values()):
            raise UsageError(
                f"{key}: embedding and head of {name} share their weights, and could not be merged with an adapter on "
                "one of them. Leave them out, as all-linear does"
            )
        for parameter in model.parameters():
            if parameter.requires_grad:  # bfloat16 would round most updates away.
                parameter.data = parameter.data.float()


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """The layers of PEFT in `model`, by their names in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def save(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Writes the adapter of `model` alone, as PEFT reads it, for the model at the path or hub id `base`."""
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {f"base_model.model.{name}": value.contiguous() for name, value in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: Any = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.base_model_name_or_path = location(base)
    config.save_pretrained(str(folder))


def fingerprint(model: PreTrainedModel) -> str:
    """A short text that tells weights apart, but not float32 from bfloat16."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            flat = parameter.detach().flatten()
            some = flat[:: max(1, flat.numel() // 16)][:16]
            digest.update(some.bfloat16().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
