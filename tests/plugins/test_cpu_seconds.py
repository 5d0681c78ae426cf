"""Plugins that parse completions in worker processes: how busy a machine is decides no reward."""

from collections.abc import Callable

import pytest

from grpo_lightning.plugins.rewards.process.process_reward import ByPattern
from grpo_lightning.plugins.rewards.reasoning_gym.gym_task import ReasoningGymReward
from grpo_lightning.plugins.rewards.verifier.math_verifier import MathVerifier
from grpo_lightning.sandbox.pool import WorkerPool


@pytest.mark.parametrize(
    "make",
    [
        lambda seconds: ByPattern("a+b", timeout=seconds)._pool,
        lambda seconds: ReasoningGymReward(timeout=seconds)._pool,
        lambda seconds: MathVerifier(timeout=seconds)._pool,
    ],
)
def test_a_timeout_counts_cpu_seconds(make: Callable[[float], WorkerPool]) -> None:
    assert make(3.0).cpu_seconds == 3.0 and make(3.0).timeout >= 30.0
