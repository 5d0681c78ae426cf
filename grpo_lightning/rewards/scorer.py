"""The weighted list of rewards: R(q, o) = sum_k weight_k * reward_k."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Self

import torch

from grpo_lightning import ranks
from grpo_lightning.maths.reward_batch import weighted_sum
from grpo_lightning.rewards.function import as_reward
from grpo_lightning.rewards.results import RewardResult, Scores, Tally
from grpo_lightning.rewards.reward import Reward, RewardFailure, Run
from grpo_lightning.types import Question, Sample, Status, UsageError, require

log = logging.getLogger(__name__)


class Scorer:
    """Scores samples with every reward of the list.

    A reward may fail on the fraction `max_failed` of a step's samples, or a validation's. The one called `correct`
    decides what is right; None is the first. `grade_by` lets another do so, the grader, which need not be in the list.
    """

    def __init__(self, rewards: Sequence[Reward], max_failed: float = 0.5, correct: str | None = None) -> None:
        rewards = [as_reward(reward) for reward in rewards]
        names = [reward.name for reward in rewards]
        require(bool(names), "rewards=[]: give at least one, e.g. rewards: [{class_path: MathVerifier}]")
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"rewards: the name {repeated[0]!r} is used twice; give each reward its own `name`")
        require(0 <= max_failed <= 1, f"model.guard.max_failed_rewards={max_failed}: give a fraction from 0 to 1")
        if correct is not None and correct not in names:
            raise UsageError(
                f"model.validation.correct={correct}: no reward has this name; give one of {', '.join(names)}"
            )
        for reward in rewards:
            others = [name for name in names if name != reward.name]
            for key, name in reward.needs.items():
                fix = f"give one of {', '.join(others)}, or a reward" if others else "give a reward"
                require(name in others, f"{key}={name} of {reward.name}: no other reward has this name; {fix}")
        self.rewards = rewards
        self.max_failed = max_failed
        self.main = self.rewards[names.index(correct) if correct else 0]
        """The reward of the list that decides what is right where there is no other grader."""
        self.grader = self.main
        """The reward that decides what is right."""

    @property
    def all_rewards(self) -> list[Reward]:
        """The rewards of the list, and the grader where it is none of them: then nothing is learned from it."""
        return self.rewards if self.grader in self.rewards else [*self.rewards, self.grader]

    def grade_by(self, grader: Reward) -> None:
        """Lets `grader` decide what is right, unless that would cost too much and it is no reward of the list.

        Its name must be none of theirs.
        """
        self.grader = grader if grader in self.rewards or grader.grades_cheaply else self.main

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Lets every reward read the questions before the run."""
        for reward in self.rewards:
            reward.read_questions(questions)

    def setup(self, run: Run) -> None:
        """Lets every reward read its weights, and take its defaults from the run."""
        for reward in self.all_rewards:
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
        for reward in self.all_rewards:
            reward.close()

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The scores of B samples; failures are in the statuses."""
        return Scoring(self, {}).scores(samples)

    def begin(self) -> "Scoring":
        """To score samples as they come, by the rewards that can: `with scorer.begin() as scoring`."""
        # One that is in the list twice would be called from two threads.
        times = Counter(id(part) for reward in self.all_rewards for part in reward.with_parts())
        early = {
            reward.name: EarlyScores(reward)
            for reward in self.all_rewards
            if all(part.scores_early and times[id(part)] == 1 for part in reward.with_parts())
        }
        return Scoring(self, early)

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        """The metrics of `Reward.learn` of every reward, as `reward/<name>/<key>`. Every rank must call it."""
        return {
            f"reward/{reward.name}/{key}": value
            for reward in self.rewards
            for key, value in reward.learn(samples, scores, iteration_ends).items()
        }

    def stop_if_broken(self, where: str = "step") -> None:
        """Reports the failures of a step or a validation, and raises RewardFailure if all ranks have too many."""
        found = self.report()
        for part, tally in found:
            if tally.num_samples:
                part.stop_if_broken(tally.statuses)
        for reward, tally in found:
            if reward in self.rewards and tally.failed.total() > self.max_failed * tally.num_samples:
                raise RewardFailure(
                    f"reward {reward.name} {tally.describe()}; "
                    f"model.guard.max_failed_rewards={self.max_failed} of a {where}'s samples"
                )

    def report(self) -> list[tuple[Reward, Tally]]:
        """Warns of failures since the last report. Returns every reward and part with its tally over all ranks."""
        trained = [part for reward in self.rewards for part in reward.with_parts()]
        everyone = [part for reward in self.all_rewards for part in reward.with_parts()]
        by_rank = ranks.gather([part.tally for part in everyone])
        found = [(part, Tally.total(tallies)) for part, *tallies in zip(everyone, *by_rank, strict=True)]
        for part, tally in found:
            part.tally = Tally()
            # To a grader beside the rewards a question without a gold answer is no failure: nothing needs its value.
            is_failure = part in trained or tally.failed.keys() - {Status.NO_GOLD}
            if tally.failed and is_failure and ranks.rank() == 0:
                log.warning("reward %s %s", part.name, tally.describe())
        return found[: len(trained)]


class EarlyScores(Thread):
    """One reward's scores, found in a thread while more samples come: all that have come are scored together."""

    def __init__(self, reward: Reward) -> None:
        # A server that does not answer must not keep the program from ending.
        super().__init__(name=f"grpo-reward-{reward.name}", daemon=True)
        self.reward = reward
        self.coming: SimpleQueue[Sample | None] = SimpleQueue()  # the samples to score; None comes last
        self._parts: list[tuple[list[Sample], RewardResult]] = []
        self._error: BaseException | None = None
        self._given_up = False
        self.start()

    def parts(self) -> list[tuple[list[Sample], RewardResult]]:
        """Waits for the scores of all samples that came, as they were scored together."""
        while self.is_alive():
            # Another rank's failure is raised here as soon as Python runs.
            self.join(0.1)
        if self._error is not None:
            raise self._error
        return self._parts

    def give_up(self) -> None:
        """Ends the thread, if it has not ended, once the reward is closed and returns."""
        if self.is_alive():
            self._given_up = True
            self.coming.put(None)
            self.reward.close()

    def run(self) -> None:
        """Scores until the last sample has come."""
        try:
            coming: list[Sample | None] = []
            while None not in coming and not self._given_up:
                coming = [self.coming.get()]
                while not self.coming.empty():  # nobody else takes from it
                    coming.append(self.coming.get())
                batch = [sample for sample in coming if sample is not None]
                if batch and not self._given_up:
                    self._parts.append((batch, self.reward(batch)))
        except BaseException as error:  # for the thread that waits
            self._error = error


class Scoring:
    """Scores samples that come one after another. The scores are those of all samples at once."""

    def __init__(self, scorer: Scorer, early: Mapping[str, EarlyScores]) -> None:
        self.scorer, self.early = scorer, early
        self._added: set[int] = set()

    def add(self, sample: Sample) -> None:
        """Lets the rewards begin with a sample, unless its environment failed."""
        if sample.failed:
            return
        self._added.add(id(sample))
        for one in self.early.values():
            one.coming.put(sample)

    def scores(self, samples: Sequence[Sample]) -> Scores:
        """Waits for the scores of `samples`, in this order: those that were added, and others."""
        for sample in samples:
            if id(sample) not in self._added:
                self.add(sample)
        for one in self.early.values():
            one.coming.put(None)
        whole, failed = ([one for one in samples if one.failed is fails] for fails in (False, True))
        talks = [sample.conversation for sample in failed if sample.conversation]
        lost = RewardResult([math.nan] * len(failed), [talk.status for talk in talks])
        rewards = self.scorer.all_rewards
        results = dict.fromkeys([reward.name for reward in rewards], lost)
        # Those that have begun are waited for last.
        for reward in sorted(rewards, key=lambda reward: reward.name in self.early):
            early = self.early.get(reward.name)
            parts = early.parts() if early else [(whole, reward(whole))] if whole else []
            # A sample whose environment failed has nothing to score; that counts as a failure of the reward.
            for sample, talk in zip(failed, talks, strict=True):
                reward.tally.explain(sample, talk.status, talk.error)
            reward.tally.add(failed, lost.value, lost.status)
            scored = [sample for some, _ in parts for sample in some] + failed
            row = {id(sample): row for row, sample in enumerate(scored)}
            result = RewardResult.concat([*(result for _, result in parts), lost])
            results[reward.name] = result.rows([row[id(sample)] for sample in samples])
        weight = {reward.name: reward.weight for reward in self.scorer.rewards if reward.weight != 0}
        value = torch.tensor([results[name].value for name in weight], dtype=torch.float64)
        factor = torch.tensor([*weight.values()], dtype=torch.float64)
        total = weighted_sum(factor, value.reshape(len(weight), len(samples))).tolist()
        return Scores(total, results, weight, self.scorer.grader.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for one in self.early.values():
            one.give_up()
