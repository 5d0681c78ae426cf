"""The weighted list of rewards: R(q, o) = sum_k weight_k * reward_k."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from grpo_lightning.rewards.base import OK, Reward, RewardFailure, RewardResult
from grpo_lightning.types import Question, Sample, UsageError

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Scores:
    """The scores of B samples."""

    total: list[float]
    """[B] the weighted sum; NaN where a reward that counts failed."""
    results: dict[str, RewardResult]
    """What each reward said, by its name, in the order of the list."""

    @property
    def main(self) -> RewardResult:
        """The first reward's: it decides what counts as a right answer in validation."""
        return next(iter(self.results.values()))

    @classmethod
    def concat(cls, parts: Sequence["Scores"]) -> "Scores":
        """The same rewards' scores of several batches of samples."""

        def joined(name: str) -> RewardResult:
            results = [part.results[name] for part in parts]
            answers = [result.answer or [None] * len(result.value) for result in results]
            steps = [result.steps or [[] for _ in result.value] for result in results]
            return RewardResult(
                value=list(chain.from_iterable(result.value for result in results)),
                status=list(chain.from_iterable(result.status for result in results)),
                answer=list(chain.from_iterable(answers)) if any(r.answer for r in results) else None,
                steps=list(chain.from_iterable(steps)) if any(r.steps for r in results) else None,
            )

        total = list(chain.from_iterable(part.total for part in parts))
        return cls(total, {name: joined(name) for name in parts[0].results})

    def describe(self, row: int) -> dict[str, tuple[float, str]]:
        """Value and status of each reward for one sample."""
        return {name: (result.value[row], result.status[row]) for name, result in self.results.items()}


class Scorer:
    """Scores samples with every reward of the list.

    Args:
        rewards: The terms; their names must differ.
        max_failed: Largest share of a batch's samples that one reward may fail on.
    """

    def __init__(self, rewards: Sequence[Reward], max_failed: float = 0.5) -> None:
        names = [reward.name for reward in rewards]
        if not names:
            raise UsageError("rewards=[]: give at least one, e.g. rewards: [{class_path: MathVerifier}]")
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"rewards: the name {repeated[0]!r} is used twice; give each reward its own `name`")
        if not 0 <= max_failed <= 1:
            raise UsageError(f"model.max_failed_rewards={max_failed}: give a share from 0 to 1")
        self.rewards = list(rewards)
        self.max_failed = max_failed

    def prepare(self, questions: Sequence[Question]) -> None:
        """Lets every reward see the questions before the run."""
        for reward in self.rewards:
            reward.prepare(questions)

    def setup(self, device: "torch.device") -> None:
        """Lets every reward read its weights."""
        for reward in self.rewards:
            reward.setup(device)

    def state_dict(self) -> dict[str, Any]:
        """The states of the rewards that have one, by name."""
        states = {reward.name: reward.state_dict() for reward in self.rewards}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; a reward that was not there keeps its own state."""
        for reward in self.rewards:
            if reward.name in states:
                reward.load_state_dict(states[reward.name])

    def close(self) -> None:
        """Closes every reward."""
        for reward in self.rewards:
            reward.close()

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Scores B samples; failures are in the statuses."""
        total = [0.0] * len(samples)
        results = {}
        for reward in self.rewards:
            result = results[reward.name] = reward(samples) if samples else RewardResult([], [])
            if reward.weight != 0:
                total = [sum_ + reward.weight * value for sum_, value in zip(total, result.value, strict=True)]
        return Scores(total, results)

    def check(self, scores: Scores) -> None:
        """Raises RewardFailure if a reward failed on more than `max_failed` of the samples, or says so itself."""
        for reward in self.rewards:
            reward.check(scores.results[reward.name])
        for name, result in scores.results.items():
            failed = sum(map(math.isnan, result.value))
            if failed > self.max_failed * len(result.value):
                kinds = Counter(status for status in result.status if status != OK).most_common()
                raise RewardFailure(
                    f"reward {name} failed on {failed} of {len(result.value)} samples "
                    f"({', '.join(f'{status}: {count}' for status, count in kinds)}); "
                    f"max_failed_rewards={self.max_failed}. The warnings above name the first failures"
                )
