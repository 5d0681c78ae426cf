"""Methods in whole runs: what they read is there, and what they remember survives a resume."""

from pathlib import Path
from typing import Any

import pytest
from helpers.fast import fit
from helpers.fitting import of_updates, resumes_exactly
from helpers.loading import load_example
from torch import Tensor

from grpo_lightning import AdaptiveEntropy, FrozenCopy, GroupMean, Objective, UsageError

methods = load_example("methods_of_2026")


class Damped(GroupMean):
    """Less of the group's deviation each step: an advantage that remembers."""

    def __init__(self) -> None:
        self.steps = 0

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        self.steps += 1
        return super().estimate(reward, group, num_groups) / self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_what_advantages_and_entropy_remember_is_resumed(tmp_path: Path) -> None:
    made: list[AdaptiveEntropy] = []

    def options() -> dict[str, Any]:
        made.append(AdaptiveEntropy(target=9.0, delta=0.02))
        return {"loop": {"mu": 2}, "advantage": Damped(), "objective": Objective(entropy=made[-1])}

    resumes_exactly(tmp_path, options, steps=4, cut=2)
    whole, _, resumed = made
    assert whole.level == resumed.level == pytest.approx(8 * 0.02)
    assert of_updates(tmp_path / "whole", "policy/entropy_coefficient")[-1] == pytest.approx([0.14, 0.16])


def test_an_advantage_reads_the_reference_and_the_old_policy(tmp_path: Path) -> None:
    """TOP-D against the policy as it was at first: at the first step both agree, and nothing moves it."""
    module = fit(tmp_path, loop={"mu": 2}, advantage=methods.TOPD(), objective=Objective())
    assert isinstance(module.reference, FrozenCopy)
    assert of_updates(tmp_path, "optim/grad_norm")[0] == [0, 0]


def test_a_denominator_that_needs_advantages_first_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="denominator=has_advantage"):
        fit(tmp_path, advantage=methods.TOPD(), objective=Objective(denominator="has_advantage"))
