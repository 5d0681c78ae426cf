"""An optimizer with 8-bit state, named by its class path: it trains, is saved, resumes, and a plan knows its size."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.command import Grpo
from helpers.fast import policy_of
from helpers.fitting import checkpoint_of, scalars
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grpo_lightning.plugins.planning.memory import state_ratio

pytestmark = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
    pytest.mark.filterwarnings("default"),  # a package that is no dependency may warn
]

ADAM = ["--model.optimizer=bitsandbytes.optim.AdamW8bit", "--model.optimizer.lr=0.001"]


def test_it_trains_and_resumes_exactly(grpo: Grpo, tmp_path: Path) -> None:
    # Only tensors of 4,096 elements or more have a state in 8 bits.
    policy_of(hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "policy")
    for name, steps in (("whole", ["2"]), ("cut", ["1", "2"])):
        for number in steps:
            folder = f"--trainer.default_root_dir={name}"
            grpo.ok("fit", *ADAM, folder, f"--trainer.max_epochs={number}", "--ckpt_path=last")
    cut, whole = ({n: v for n, v in scalars(tmp_path / run).items() if n[:7] != "update/"} for run in ("cut", "whole"))
    assert cut == whole  # those left out are of steps that are recorded, as a run's last one is
    saved = checkpoint_of(tmp_path / "cut")
    states = saved["optimizer_states"][0]["state"].values()
    assert torch.uint8 in {leaf.dtype for state in states for leaf in tree_leaves(state) if isinstance(leaf, Tensor)}


def test_a_plan_counts_8_bits() -> None:
    import bitsandbytes

    adam = partial(bitsandbytes.optim.AdamW8bit, lr=1e-3)
    assert 0.5 <= state_ratio(adam, torch.float32) < 0.6  # two values of one byte for each of four, and their scales
