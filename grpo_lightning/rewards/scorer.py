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

    Args:
        rewards: The rewards; functions become `FunctionReward`.
        max_failed: Fraction of the samples of a step, or of a validation, on which a reward may fail.
        correct: Name of the reward that decides what is right; None is the first. `grade_by` lets another reward
            decide, which need not be in the list.
    """

    def __init__(self, rewards: Sequence[Reward], max_failed: float = 0.5, correct: str | None = None) -> None:
        rewards = [as_reward(reward) for reward in rewards]
        names = [reward.name for reward in rewards]
        require(bool(names), "rewards=[]: give at least one, e.g. rewards: [my_rewards.shorter]")
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"rewards: the name {repeated[0]!r} is used twice; give each reward its own `name`")
        require(0 <= max_failed <= 1, f"model.guard.max_failed_rewards={max_failed}: give a fraction from 0 to 1")
        if correct is not None and correct not in names:
            raise UsageError(
                f"model.validation.correct={correct}: no reward has this name; give one of {', '.join(names)}"
            )
        for reward in rewards:
            other_names = [name for name in names if name != reward.name]
            for key, name in reward.needs.items():
                if name not in other_names:
                    advice = f"give one of {', '.join(other_names)}, or a reward" if other_names else "give a reward"
                    raise UsageError(f"{key}={name} of {reward.name}: no other reward has this name; {advice}")
        self.rewards = rewards
        self.max_failed = max_failed
        self.main = self.rewards[names.index(correct) if correct else 0]
        """The reward of the list that decides what is right, unless there is another grader."""
        self.grader = self.main
        """The reward that decides what is right."""

    @property
    def all_rewards(self) -> list[Reward]:
        """The rewards of the list, and the grader; the policy does not learn from a grader beside the list."""
        return self.rewards if self.grader in self.rewards else [*self.rewards, self.grader]

    def grade_by(self, grader: Reward) -> None:
        """Lets `grader` decide what is right, unless that would cost too much and it is no reward of the list.

        A grader beside the list must not have the name of a reward.
        """
        self.grader = grader if grader in self.rewards or grader.grades_cheaply else self.main

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Calls `read_questions` of every reward, before the run."""
        for reward in self.rewards:
            reward.read_questions(questions)

    def setup(self, run: Run) -> None:
        """Calls `setup` of every reward, which reads weights and takes defaults from the run."""
        for reward in self.all_rewards:
            reward.setup(run)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the rewards that have a state, by their names."""
        states = {reward.name: reward.state_dict() for reward in self.rewards}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; a reward without a saved state keeps its state."""
        for reward in self.rewards:
            if reward.name in states:
                reward.load_state_dict(states[reward.name])

    def close(self) -> None:
        """Closes every reward."""
        for reward in self.all_rewards:
            reward.close()

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Returns the scores of B samples; failures are in the statuses."""
        return Scoring(self, {}).scores(samples)

    def begin(self) -> "Scoring":
        """Starts the rewards that can score samples as they come: `with scorer.begin() as scoring`."""
        # A reward that is in the list twice would be called from two threads.
        num_uses = Counter(id(nested) for reward in self.all_rewards for nested in reward.with_parts())
        early = {
            reward.name: EarlyScores(reward)
            for reward in self.all_rewards
            if all(nested.scores_early and num_uses[id(nested)] == 1 for nested in reward.with_parts())
        }
        return Scoring(self, early)

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        """Calls `learn` of every reward. Returns its metrics as `reward/<name>/<key>`. Every rank must call it."""
        return {
            f"reward/{reward.name}/{key}": value
            for reward in self.rewards
            for key, value in reward.learn(samples, scores, iteration_ends).items()
        }

    def stop_if_broken(self, stage: str = "step") -> None:
        """Reports the failures of a step or a validation, and raises RewardFailure if all ranks have too many."""
        tallies = self.report()
        for reward, tally in tallies:
            if tally.num_samples:
                reward.stop_if_broken(tally.statuses)
        for reward, tally in tallies:
            if reward in self.rewards and tally.failed.total() > self.max_failed * tally.num_samples:
                raise RewardFailure(
                    f"reward {reward.name} {tally.describe()}; "
                    f"model.guard.max_failed_rewards={self.max_failed} of a {stage}'s samples"
                )

    def report(self) -> list[tuple[Reward, Tally]]:
        """Warns of failures since the last report.

        Returns:
            Every reward of the list, and every reward inside it, with its tally over all ranks.
        """
        trained = [nested for reward in self.rewards for nested in reward.with_parts()]
        rewards = [nested for reward in self.all_rewards for nested in reward.with_parts()]
        tallies_by_rank = ranks.gather([reward.tally for reward in rewards])
        totals = [Tally.total(tallies) for tallies in zip(*tallies_by_rank, strict=True)]
        tally_of_reward = list(zip(rewards, totals, strict=True))
        for reward, tally in tally_of_reward:
            reward.tally = Tally()
            # To a grader beside the list a question without a gold answer is no failure: nothing needs its value.
            is_failure = reward in trained or tally.failed.keys() - {Status.NO_GOLD}
            if tally.failed and is_failure and ranks.rank() == 0:
                log.warning("reward %s %s", reward.name, tally.describe())
        return tally_of_reward[: len(trained)]


class EarlyScores(Thread):
    """One reward's scores, found in a thread while more samples come: all samples that have come are scored together.

    Args:
        reward: Scores the samples.
    """

    def __init__(self, reward: Reward) -> None:
        # A daemon: a server that does not answer must not keep the program from ending.
        super().__init__(name=f"grpo-reward-{reward.name}", daemon=True)
        self.reward = reward
        self.coming: SimpleQueue[Sample | None] = SimpleQueue()
        """The samples to score; None comes last."""
        self._batches: list[tuple[list[Sample], RewardResult]] = []
        self._error: BaseException | None = None
        self._given_up = False
        self.start()

    def batches(self) -> list[tuple[list[Sample], RewardResult]]:
        """Waits for the scores of all samples that came. Returns each batch that was scored, with its scores."""
        while self.is_alive():
            # Another rank's failure is raised here as soon as Python runs.
            self.join(0.1)
        if self._error is not None:
            raise self._error
        return self._batches

    def give_up(self) -> None:
        """Ends the thread, if it has not ended: closing the reward makes its `score` return."""
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
                while not self.coming.empty():  # no other thread takes from it
                    coming.append(self.coming.get())
                batch = [sample for sample in coming if sample is not None]
                if batch and not self._given_up:
                    self._batches.append((batch, self.reward(batch)))
        except BaseException as error:  # raised again in the thread that waits
            self._error = error


class Scoring:
    """Scores samples that come one after another. The scores are the same as for all samples at once.

    Args:
        scorer: The rewards.
        early: The rewards that score in threads, by their names.
    """

    def __init__(self, scorer: Scorer, early: Mapping[str, EarlyScores]) -> None:
        self.scorer, self.early = scorer, early
        self._added_ids: set[int] = set()
        """The `id` of each sample that the rewards have."""

    def add(self, sample: Sample) -> None:
        """Gives a sample to the rewards that score early, unless its environment failed."""
        if sample.failed:
            return
        self._added_ids.add(id(sample))
        for early in self.early.values():
            early.coming.put(sample)

    def scores(self, samples: Sequence[Sample]) -> Scores:
        """Waits for the scores of `samples`, added before or not, and returns them in this order."""
        for sample in samples:
            if id(sample) not in self._added_ids:
                self.add(sample)
        for early in self.early.values():
            early.coming.put(None)

        # A sample whose environment failed has nothing to score: every reward gives NaN and the environment's status.
        scorable = [sample for sample in samples if not sample.failed]
        failed = [sample for sample in samples if sample.failed]
        conversations = [sample.conversation for sample in failed if sample.conversation]
        failed_result = RewardResult([math.nan] * len(failed), [conversation.status for conversation in conversations])

        rewards = self.scorer.all_rewards
        results = dict.fromkeys([reward.name for reward in rewards], failed_result)
        # The rewards that have begun in threads are waited for last.
        for reward in sorted(rewards, key=lambda reward: reward.name in self.early):
            if reward.name in self.early:
                batches = self.early[reward.name].batches()
            else:
                batches = [(scorable, reward(scorable))] if scorable else []

            # An environment's failure counts as a failure of the reward.
            for sample, conversation in zip(failed, conversations, strict=True):
                reward.tally.explain(sample, conversation.status, conversation.error)
            reward.tally.add(failed, failed_result.value, failed_result.status)

            # The scores come batch after batch; put them into the order of `samples`.
            scored = [sample for batch, _ in batches for sample in batch] + failed
            row_by_id = {id(sample): row for row, sample in enumerate(scored)}
            result = RewardResult.concat([*(result for _, result in batches), failed_result])
            results[reward.name] = result.rows([row_by_id[id(sample)] for sample in samples])

        # R(q, o), the weighted sum.
        weight = {reward.name: reward.weight for reward in self.scorer.rewards if reward.weight != 0}
        value = torch.tensor([results[name].value for name in weight], dtype=torch.float64)
        factor = torch.tensor([*weight.values()], dtype=torch.float64)
        value = value.reshape(len(weight), len(samples))
        # A reward that does not apply to a sample adds nothing; a sample to which none applies has no total.
        is_absent = [[status == Status.NOT_APPLICABLE for status in results[name].status] for name in weight]
        absent = torch.tensor(is_absent).reshape(value.shape).bool()
        absent &= ~absent.all(0)
        total = weighted_sum(factor, value.masked_fill(absent, 0.0)).tolist()
        return Scores(total, results, weight, self.scorer.grader.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for early in self.early.values():
            early.give_up()
