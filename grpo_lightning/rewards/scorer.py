"""The weighted list of rewards: R(q, o) = sum_k weight_k * reward_k."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from grpo_lightning import ranks
from grpo_lightning.maths.reward_batch import weighted_sum
from grpo_lightning.rewards.base import Reward, RewardFailure, Run
from grpo_lightning.rewards.early import EarlyScores
from grpo_lightning.rewards.results import RewardResult, Scores
from grpo_lightning.rewards.tally import Tally
from grpo_lightning.types import Question, Sample, UsageError

log = logging.getLogger(__name__)


class Scorer:
    """Scores samples with every reward of the list.

    Args:
        rewards: The terms; their names must differ.
        max_failed: Largest fraction of the samples of a step, or a validation, over all ranks, that one reward may
            fail on.
        correct: The name of the reward that decides what is right; None is the first.

    Raises:
        UsageError: There are no rewards, two share a name, a name that is referred to does not exist, or `max_failed`
            is not a fraction.
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
        for reward in rewards:
            _check_needs(reward, [name for name in names if name != reward.name])
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
            reward.read_questions(questions)

    def setup(self, run: Run) -> None:
        """Lets every reward read its weights, and take its defaults from the run."""
        for reward in self.rewards:
            reward.setup(run)

    def state_dict(self) -> dict[str, Any]:
        """The states of the rewards that have one, by their names."""
        states = {reward.name: reward.state_dict() for reward in self.rewards}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; a reward that it lacks keeps its state."""
        for reward in self.rewards:
            if reward.name in states:
                reward.load_state_dict(states[reward.name])

    def close(self) -> None:
        """Closes every reward."""
        for reward in self.rewards:
            reward.close()

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The scores of B samples; failures are in the statuses."""
        return self.sum({reward.name: scored_by(reward, samples) for reward in self.rewards}, len(samples))

    def begin(self) -> "Scoring":
        """To score samples as they come, by the rewards that can: `with scorer.begin() as scoring`."""
        # One that is in the list twice would be called from two threads.
        times = Counter(id(part) for reward in self.rewards for part in reward.with_parts())
        early = (r for r in self.rewards if all(p.scores_early and times[id(p)] == 1 for p in r.with_parts()))
        return Scoring(self, [EarlyScores(reward) for reward in early])

    def sum(self, results: Mapping[str, RewardResult], num_samples: int) -> Scores:
        """The scores from the result of each reward."""
        weight = {reward.name: reward.weight for reward in self.rewards if reward.weight != 0}
        value = torch.tensor([results[name].value for name in weight], dtype=torch.float64)
        factor = torch.tensor([*weight.values()], dtype=torch.float64)
        total = weighted_sum(factor, value.reshape(len(weight), num_samples)).tolist()
        return Scores(total, {reward.name: results[reward.name] for reward in self.rewards}, [*weight], self.correct)

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        """Lets every reward learn from a step; as in `Reward.learn`. Every rank must call it.

        Returns:
            The metrics of all rewards, by their whole names: `reward/<name>/<key>`.
        """
        return {
            f"reward/{reward.name}/{key}": value
            for reward in self.rewards
            for key, value in reward.learn(samples, scores, iteration_ends).items()
        }

    def stop_if_broken(self, where: str = "step") -> None:
        """Reports the failures of a step or a validation, and stops the run if there were too many.

        Every rank must call it. The ranks decide alike, from the counts of all ranks and all rounds.

        Raises:
            RewardFailure: A reward failed on more than `max_failed` of the samples, or finds itself broken.
        """
        tallies = settle(self.rewards)
        for reward in self.rewards:
            tally = tallies[id(reward)]
            if tally.num_failed > self.max_failed * tally.num_samples:
                raise RewardFailure(
                    f"reward {reward.name} {tally.describe()}; max_failed_rewards={self.max_failed} of a {where}'s "
                    "samples"
                )

    def report(self) -> None:
        """Reports the failures of a prediction. Every rank must call it."""
        report(self.rewards)


class Scoring:
    """Scores samples that come one after another. The scores are those of all samples at once.

    Args:
        scorer: The rewards.
        early: Scores of those that begin with the first sample.
    """

    def __init__(self, scorer: Scorer, early: Sequence[EarlyScores]) -> None:
        self.scorer = scorer
        self.early = {one.reward.name: one for one in early}
        self._added: set[int] = set()

    def add(self, sample: Sample) -> None:
        """Lets the rewards begin with a sample."""
        self._added.add(id(sample))
        for one in self.early.values():
            one.add(sample)

    def scores(self, samples: Sequence[Sample]) -> Scores:
        """Waits for the scores of `samples`, in this order: those that were added, and others."""
        for sample in samples:
            if id(sample) not in self._added and not sample.failed:
                self.add(sample)
        for one in self.early.values():
            one.end()
        rewards = {reward.name: reward for reward in self.scorer.rewards}
        here = {name: scored_by(reward, samples) for name, reward in rewards.items() if name not in self.early}
        early = {name: scored_by(rewards[name], samples, one.result) for name, one in self.early.items()}
        return self.scorer.sum(here | early, len(samples))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for one in self.early.values():
            one.give_up()


def scored_by(
    reward: Reward, samples: Sequence[Sample], score: Callable[[Sequence[Sample]], RewardResult] | None = None
) -> RewardResult:
    """The result of one reward; where an environment failed there is nothing to score, which counts as its failure.

    Args:
        reward: The reward.
        samples: What it scores.
        score: What scores the others; None is the reward itself.
    """
    failed = [sample for sample in samples if sample.failed]
    whole = [sample for sample in samples if not sample.failed]
    result = (score or reward)(whole) if whole else RewardResult([], [])
    if not failed:
        return result
    statuses = [sample.conversation.status for sample in failed if sample.conversation]
    for sample in failed:
        assert sample.conversation is not None
        reward.tally.explain(sample, sample.conversation.status, sample.conversation.error)
    reward.tally.add(failed, [math.nan] * len(failed), statuses)
    both = RewardResult.concat([result, RewardResult([math.nan] * len(failed), statuses)])
    order = {id(sample): row for row, sample in enumerate([*whole, *failed])}
    return both.rows([order[id(sample)] for sample in samples])


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
    """Reports failures as `report` does, and lets every reward, and every one inside it, stop the run."""
    tallies = report(rewards)
    for reward in rewards:
        for part in reward.with_parts():
            if tallies[id(part)].num_samples:
                part.stop_if_broken(tallies[id(part)].statuses)
    return tallies


def _check_needs(reward: Reward, others: Sequence[str]) -> None:
    """Raises UsageError where `reward` needs one that is not among the `others` of the list."""
    for key, name in reward.needs.items():
        if name not in others:
            allowed = f"one of {', '.join(others)}, or a reward" if others else "a reward"
            raise UsageError(f"{key}={name} of {reward.name}: no other reward has this name; give {allowed}")
