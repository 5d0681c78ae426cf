"""The weighted list of rewards: R(q, o) = sum_k weight_k * reward_k."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from grpo_lightning import ranks
from grpo_lightning.rewards.base import Reward, RewardFailure, RewardResult, Run
from grpo_lightning.rewards.tally import Tally
from grpo_lightning.types import Question, Sample, UsageError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Scores:
    """The scores of B samples."""

    total: list[float]
    """[B] the weighted sum; NaN where a reward that counts failed."""
    results: dict[str, RewardResult]
    """What each reward said, by its name, in the order of the list."""
    learned_from: list[str] = field(default_factory=list)
    """The names of those whose weight is not 0."""
    correct: str | None = None
    """The name of the reward that decides what is right; None is the first."""

    @property
    def main(self) -> RewardResult:
        """The result of the reward that decides what is right."""
        return self.results[self.correct or next(iter(self.results))]

    @classmethod
    def concat(cls, parts: Sequence["Scores"]) -> "Scores":
        """The same rewards' scores of several batches of samples."""

        def joined(name: str) -> RewardResult:
            results = [part.results[name] for part in parts]
            answers = [result.answer or [None] * len(result.value) for result in results]
            segments = [result.segments or [[] for _ in result.value] for result in results]
            return RewardResult(
                value=list(chain.from_iterable(result.value for result in results)),
                status=list(chain.from_iterable(result.status for result in results)),
                answer=list(chain.from_iterable(answers)) if any(r.answer for r in results) else None,
                segments=list(chain.from_iterable(segments)) if any(r.segments for r in results) else None,
            )

        total = list(chain.from_iterable(part.total for part in parts))
        return cls(total, {name: joined(name) for name in parts[0].results}, parts[0].learned_from, parts[0].correct)

    def describe(self, row: int) -> dict[str, tuple[float, str]]:
        """Value and status of each reward for one sample."""
        return {name: (result.value[row], result.status[row]) for name, result in self.results.items()}


class Scorer:
    """Scores samples with every reward of the list.

    Args:
        rewards: The terms; their names must differ.
        max_failed: Largest fraction of a step's samples, over all ranks, that one reward may fail on.
        correct: The name of the reward that decides what is right; None is the first.
    """

    def __init__(self, rewards: Sequence[Reward], max_failed: float = 0.5, correct: str | None = None) -> None:
        names = [reward.name for reward in rewards]
        if not names:
            raise UsageError("rewards=[]: give at least one, e.g. rewards: [{class_path: MathVerifier}]")
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"rewards: the name {repeated[0]!r} is used twice; give each reward its own `name`")
        if not 0 <= max_failed <= 1:
            raise UsageError(f"model.max_failed_rewards={max_failed}: give a fraction from 0 to 1")
        if correct is not None and correct not in names:
            raise UsageError(f"model.correct={correct}: no reward has this name; give one of {', '.join(names)}")
        self.rewards = list(rewards)
        self.max_failed = max_failed
        self.correct = correct or names[0]

    @property
    def main(self) -> Reward:
        """The reward that decides what is right."""
        return next(reward for reward in self.rewards if reward.name == self.correct)

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Lets every reward read the questions before the run."""
        for reward in self.rewards:
            reward.prepare(questions)

    def setup(self, run: Run) -> None:
        """Lets every reward read its weights, and take its defaults from the run."""
        for reward in self.rewards:
            reward.setup(run)

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
        learned_from = [reward.name for reward in self.rewards if reward.weight != 0]
        return Scores(total, results, learned_from, self.correct)

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        """Lets every reward learn from a step; see `Reward.learn`. Every rank must call it.

        Returns:
            The metrics of all rewards, by their whole names: `reward/<name>/<key>`.
        """
        return {
            f"reward/{reward.name}/{key}": value
            for reward in self.rewards
            for key, value in reward.learn(samples, scores.results[reward.name], iteration_ends).items()
        }

    def stop_if_broken(self) -> None:
        """Ends an exploration step: reports its failures, and stops the run if there were too many.

        Every rank must call it. All decide from the counts of all ranks and all rounds, and say the same.

        Raises:
            RewardFailure: A reward failed on more than `max_failed` of the step's samples, or says so itself.
        """
        tallies = settle(self.rewards)
        for reward in self.rewards:
            tally = tallies[id(reward)]
            if tally.num_failed > self.max_failed * tally.num_samples:
                raise RewardFailure(
                    f"reward {reward.name} {tally.describe()}; max_failed_rewards={self.max_failed} of a step's samples"
                )

    def report(self) -> None:
        """Ends a validation or a prediction: reports its failures. Every rank must call it."""
        report(self.rewards)


def report(rewards: Sequence[Reward]) -> dict[int, Tally]:
    """Warns once of each reward that failed since the last report, and of each inside it. Every rank must call it.

    Returns:
        The tally of each over all ranks, by the `id` of the reward.
    """
    everyone = [part for reward in rewards for part in reward.with_parts()]
    by_rank = ranks.gather([part.tally for part in everyone])
    tallies = [Tally.total(tallies) for tallies in zip(*by_rank, strict=True)]
    for part, tally in zip(everyone, tallies, strict=True):
        part.tally = Tally()
        if tally.num_failed and ranks.rank() == 0:
            log.warning("reward %s %s", part.name, tally.describe())
    return {id(part): tally for part, tally in zip(everyone, tallies, strict=True)}


def settle(rewards: Sequence[Reward]) -> dict[int, Tally]:
    """`report`, and then lets every reward and every one inside it check its counts."""
    tallies = report(rewards)
    for reward in rewards:
        for part in reward.with_parts():
            if tallies[id(part)].num_samples:
                part.check(tallies[id(part)].statuses)
    return tallies
