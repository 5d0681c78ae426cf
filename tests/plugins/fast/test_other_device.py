"""The paths of a GPU on a machine without one: exploration, updates, validation and checkpoints on `other_device`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast import fit, policy_of
from helpers.fitting import Digits, scalars
from helpers.other_device import TRAINER, other_device
from torch import Tensor

from grpo_lightning import KLPenalty, LearnedReward, LeaveOneOut, Objective, RewardUpdate, Sampling, StepCheckpoint
from grpo_lightning.maths.entropy import FixedEntropy
from grpo_lightning.maths.filters import DynamicSampling, Truncated
from grpo_lightning.maths.stopping import FirstOf, KLAbove, ObjectivePlateau
from grpo_lightning.maths.surrogates import SequenceClipped
from grpo_lightning.plugins.methods.top_entropy import TopEntropy
from grpo_lightning.policy.snapshots import FrozenCopy, MovingAverage


def reward_model(folder: Path) -> LearnedReward:
    policy_of().save_pretrained(folder)
    return LearnedReward(str(folder), Digits(), update=RewardUpdate(lr=3e-3, max_forgetting=1.0))


def options(folder: Path) -> dict[str, Any]:
    """Packs, minibatches, passes, every kind of log-prob, rounds, a stop rule, a schedule, a learned reward."""
    return {
        "sampling": Sampling(max_new_tokens=6),
        "loop": {
            "prompts_per_step": 2,
            "mu": 2,
            "num_minibatches": 2,
            "max_tokens": 60,
            "steps_per_iteration": 1,
            "stop": FirstOf([KLAbove(1e3), ObjectivePlateau(9)]),
            "dynamic_sampling": DynamicSampling(),
        },
        "objective": Objective(
            SequenceClipped(),
            beta=0.1,
            masks=[Truncated(), TopEntropy(0.5)],
            entropy=FixedEntropy(0.01),
            reward_kl=KLPenalty(),
        ),
        "reference": MovingAverage(0.5),
        "old_policy": FrozenCopy(),
        "advantage": LeaveOneOut(),
        "rewards": [Digits(), reward_model(folder)],
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer),
        "grad_clip": 0.01,
    }


def test_a_run_is_the_same_elsewhere(tmp_path):
    """With a validation, and a second step that goes on from the checkpoint of the first."""

    def found(folder: Path, **more: Any) -> tuple[dict[str, Tensor], dict[str, dict[int, float]]]:
        for steps in (1, 2):
            trainer = {"max_epochs": steps, "limit_val_batches": 1, "enable_checkpointing": True} | more
            path, given = "last" if steps == 2 else None, options(tmp_path / "reward_model")
            module = fit(folder, [StepCheckpoint()], trainer=trainer, ckpt_path=path, **given)
        return {name: value.detach().cpu() for name, value in module.policy.named_parameters()}, scalars(folder)

    here, logged_here = found(tmp_path / "here")
    with other_device():
        there, logged_there = found(tmp_path / "there", **TRAINER)
    for parameter, value in here.items():
        torch.testing.assert_close(there[parameter], value, rtol=1e-4, atol=1e-5)
    assert logged_there.keys() == logged_here.keys()
    for metric, values in logged_here.items():
        assert logged_there[metric] == pytest.approx(values, rel=1e-3, abs=1e-4), metric
    state = torch.load(tmp_path / "there" / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    assert all(type(value) is Tensor and value.device.type == "cpu" for value in state.values())
