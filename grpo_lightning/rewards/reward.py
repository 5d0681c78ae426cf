"""The Reward family: samples in, one number and one status per sample out."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_lightning.rewards.results import RewardResult, Scores, Tally
from grpo_lightning.types import Question, Sample, Stateful, Status, UsageError, require

if TYPE_CHECKING:  # a worker that imports the package need not wait for torch
    import torch


class RewardFailure(RuntimeError):
    """Raised if too many samples of one step got no score: the reward is broken, not the samples."""


@dataclass(slots=True, frozen=True)
class Run:
    """The facts of the run that a reward may need, so that its arguments need not repeat them."""

    device: "torch.device"
    """The device of this rank."""
    tokenizer: Any
    """The policy's tokenizer."""
    max_new_tokens: int
    """The longest completion in tokens, the stop token included: `sampling.max_new_tokens`."""
    rank: int = 0
    """The index of this process among all processes of the run."""
    chat: bool = False
    """True if prompts are conversations: `data.chat`."""
    num_updates: Callable[[], int] = lambda: 0
    """Returns the number of updates that the run has made."""


class Reward(Stateful, ABC):
    """One term of R(q, o): scores samples. A failure costs its sample, never the run, and is counted.

    Args:
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics; by default the class name in snake case.
    """

    finds_answers: ClassVar[bool] = False
    """True if results contain the answer of each completion, so that majority votes can be counted."""
    gives_verdicts: ClassVar[bool] = False
    """True if its value is 1 for a right completion, and 0 for any other."""
    needs_answers: bool = False
    """True if it compares with the gold answer: a question without a gold answer is then refused before the run."""
    scores_early: bool = False
    """True if it scores completions while others of the step are still sampled: a reward that waits for a process.

    `score` then runs in a thread. It must score a sample the same in any batch, and must not use torch."""
    grades_cheaply: bool = True
    """False if a score costs money or much time. As the grader it then grades training only if it is a reward too."""

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        require(math.isfinite(weight), f"weight={weight} of {type(self).__name__}: give a finite number")
        self.weight = weight
        self.name = name or snake_case(type(self).__name__)
        self.parts: Sequence[Reward] = ()
        """The rewards inside this reward, which are set up, checked and closed with it."""
        self.needs: Mapping[str, str] = {}
        """The names of other rewards of the list whose results `learn` reads, by the argument that names them."""
        self.tally = Tally()
        """The counts of the samples scored since the last report."""

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Scores `samples`, in order. If it raises, each sample is tried again alone."""

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Reads every question once before the run, to parse gold answers and to refuse bad ones."""
        unanswered = [question for question in questions if self.needs_answers and not question.answer.strip()]
        if unanswered:
            raise UsageError(
                f"{unanswered[0].source or unanswered[0].text}: "
                f"no gold answer, as in {len(unanswered)} of {len(questions)} questions, "
                f"and the reward {self.name} compares with it. "
                "Set data.task.answer to its column, fix the rows, or leave it out"
            )
        for nested_reward in self.parts:
            nested_reward.read_questions(questions)

    def setup(self, run: Run) -> None:
        """Reads weights to `run.device`, unless it holds them, and takes defaults. Called before every stage."""
        for nested_reward in self.parts:
            nested_reward.setup(run)

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        """Learns from a step, after its updates: line 12 of DeepSeekMath's Algorithm 1.

        Args:
            samples: The completions that this rank explored in the step.
            scores: Their scores by every reward of the list.
            iteration_ends: True after the last of the iteration's M steps (`loop.steps_per_iteration`), where the
                algorithm updates the reward model. Without iterations it is true after every step.

        Returns:
            Numbers to log as `reward/<name>/<key>`, with the same keys on every rank.
        """
        return {}

    def stop_if_broken(self, statuses: Counter[str]) -> None:
        """Raises RewardFailure if the statuses of a step, over all ranks, show that the reward is broken."""

    def close(self) -> None:
        """Ends worker processes, and frees what else the reward holds. May be called twice."""
        for nested_reward in self.parts:
            nested_reward.close()

    def with_parts(self) -> Iterator["Reward"]:
        """Yields this reward, and the rewards inside it at any depth."""
        yield self
        for nested_reward in self.parts:
            yield from nested_reward.with_parts()

    def __call__(self, samples: Sequence[Sample]) -> RewardResult:
        """Returns the result of `score`, which `tally` counts. A sample on which it raises gets NaN, status `error`."""
        result = self._contained(samples)
        self.tally.add(samples, result.value, result.status)
        return result

    def _contained(self, samples: Sequence[Sample]) -> RewardResult:
        previous_tallies = [(reward, deepcopy(reward.tally)) for reward in self.with_parts() if reward is not self]
        try:
            return self._checked(samples)
        except Exception as error:
            if len(samples) == 1 or isinstance(self, GroupReward):
                self.tally.explain(samples[0], Status.ERROR, f"{type(error).__name__}: {error}")
                return RewardResult([math.nan] * len(samples), [Status.ERROR] * len(samples))

        # Each sample is tried again alone, and the nested rewards count it again.
        for nested_reward, tally in previous_tallies:
            nested_reward.tally = tally
        return RewardResult.concat([self._contained([sample]) for sample in samples])

    def _checked(self, samples: Sequence[Sample]) -> RewardResult:
        result = self.score(samples)
        name = f"{type(self).__name__}.score"
        if not isinstance(result, RewardResult):
            raise TypeError(f"{name} returned {described(result)}; return a RewardResult")
        if odd := [value for value in result.value if not hasattr(value, "__float__")]:
            raise TypeError(f"{name} returned {described(odd[0])} for a sample; return numbers")
        num_values = len(result.value)
        num_statuses = len(result.status)
        if not num_values == num_statuses == len(samples):
            raise ValueError(
                f"{name} returned {num_values} values and {num_statuses} statuses for {len(samples)} samples"
            )

        # The segments of a completion are in order, and end inside it.
        for sample, segments in zip(samples, result.segments or [], strict=bool(result.segments)):
            ends = [segment.end for segment in segments]
            if ends != sorted(set(ends)) or not all(0 <= end < len(sample.token_ids) for end in ends):
                raise ValueError(
                    f"{name}: segments that end at {ends} in a completion of {len(sample.token_ids)} tokens; "
                    "`end` is an index from 0, and later segments end later"
                )

        # A value that nothing can be learned from counts as a failure.
        for row, (value, status) in enumerate(zip(result.value, result.status, strict=True)):
            if math.isinf(value) or (math.isnan(value) and status == Status.OK):
                result.value[row], result.status[row] = math.nan, Status.NOT_FINITE
        return result


class GroupReward(Reward):
    """A reward whose `score` gets the completions of one prompt together, to compare them.

    A failure costs the whole group. The greedy answer of a validation comes alone.
    """

    def _contained(self, samples: Sequence[Sample]) -> RewardResult:
        groups = rows_by_prompt(samples)
        results = [Reward._contained(self, [samples[row] for row in rows]) for rows in groups]

        # The results come group after group; sorting by sample puts them into the order of `samples`.
        order = [row for rows in groups for row in rows]
        return RewardResult.concat(results).rows(sorted(range(len(order)), key=order.__getitem__))


def rows_by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """Returns the indices of the samples of each prompt."""
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.prompt.id, []).append(row)
    return [*groups.values()]


def title_of(class_name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the name of a reward in captions: its class, or the function that it calls."""
    name = str(arguments.get("function", class_name)) if class_name == "FunctionReward" else class_name
    return name.replace(":", ".")


def meaning_of_mean(title: str, gives_verdicts: bool) -> str:
    """Returns the meaning of the mean of a reward's values: `fraction right by ...`, or `mean of my_rewards.brief`."""
    return f"fraction right by {title}" if gives_verdicts else f"mean of {title}"


def described(value: Any) -> str:
    """Returns a value and its type in words, for messages: `'1.0' (str)`."""
    return f"{value!r:.80} ({type(value).__name__})"


def snake_case(name: str) -> str:
    """Returns the name of a class in snake case: `FormatReward` -> `format_reward`."""
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))
