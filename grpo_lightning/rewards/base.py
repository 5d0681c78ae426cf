"""What a reward is: samples in, one number and one status a sample out."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_lightning.rewards.tally import Tally
from grpo_lightning.types import Question, Sample, UsageError

if TYPE_CHECKING:  # workers that import the package need not wait for torch
    import torch

OK = "ok"
ERROR = "error"


class RewardFailure(RuntimeError):
    """Too many samples of one step got no score: the reward is broken, not the samples."""


@dataclass(slots=True, frozen=True)
class Run:
    """What a reward may want to know about the run."""

    device: "torch.device"
    """Where this rank computes."""
    tokenizer: Any
    """The policy's."""
    max_new_tokens: int
    """Longest completion in tokens, the stop token included."""
    rank: int = 0
    """This process, of all the processes of the run."""


@dataclass(slots=True, frozen=True)
class Segment:
    """The reward of one segment of a completion."""

    end: int
    """Index of the segment's last token in the completion, from 0."""
    value: float


@dataclass(slots=True)
class RewardResult:
    """The scores of B samples."""

    value: list[float]
    """[B] the reward; NaN where the reward failed, which leaves the sample out of its group."""
    status: list[str]
    """[B] `ok`, or in one word what happened (`no_answer`, `timeout`, `error`, ...); every rate is a metric."""
    answer: list[str | None] | None = None
    """[B] the answer found in each completion, equal answers as equal strings: majority votes count it."""
    segments: list[list[Segment]] | None = None
    """[B] scores of each completion's segments, for `ProcessSupervision`; `value` is still what the whole is worth."""


class Reward(ABC):
    """One term of R(q, o): scores samples. A failure costs the sample it happened on, never the run, and is counted.

    Args:
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics; by default the class name in snake case.
    """

    finds_answers: ClassVar[bool] = False
    """Whether results name the answer found, so that majority votes can be counted."""

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        if not math.isfinite(weight):
            raise UsageError(f"weight={weight} of {type(self).__name__}: give a finite number")
        self.weight = weight
        self.name = name or snake_case(type(self).__name__)
        self.parts: Sequence[Reward] = ()
        """The rewards inside this one, which are prepared, set up, checked and closed with it."""
        self.tally = Tally()
        """What became of the samples since the last report."""

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Scores `samples`, in order. May raise: then the samples are tried again one by one."""

    def prepare(self, questions: Sequence[Question]) -> None:
        """Sees every question once before the run: parse the gold answers, complain about a bad one."""
        for part in self.parts:
            part.prepare(questions)

    def setup(self, run: Run) -> None:
        """Called once per run, before the first sample: reads weights to `run.device`, takes defaults from the run."""
        for part in self.parts:
            part.setup(run)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for a resumed run to go on exactly: numbers, text, tensors, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""

    def learn(self, samples: Sequence[Sample], result: RewardResult, iteration_ends: bool) -> dict[str, float]:
        """Line 12 of DeepSeekMath's Algorithm 1, for a reward that learns: called after the updates of every step.

        Args:
            samples: What this rank explored in the step.
            result: What this reward said of them.
            iteration_ends: Whether this was the last of the iteration's M steps (`loop.steps_per_iteration`), where the
                algorithm updates the reward model; without iterations it is so after every step.

        Returns:
            Numbers to log as `reward/<name>/<key>`, the same keys on every rank.
        """
        return {}

    def check(self, statuses: Counter[str]) -> None:
        """Called once per step of training, on every rank alike.

        Args:
            statuses: How many samples of the step got each status, over all ranks.

        Raises:
            RewardFailure: The counts say that the reward is broken, and the run must stop.
        """

    def close(self) -> None:
        """Releases worker processes and the like. May be called twice."""
        for part in self.parts:
            part.close()

    def with_parts(self) -> Iterator["Reward"]:
        """This reward, the rewards inside it, and those inside them."""
        yield self
        for part in self.parts:
            yield from part.with_parts()

    def __call__(self, samples: Sequence[Sample]) -> RewardResult:
        """`score` with failures contained: a sample on which it raises gets NaN and the status `error`.

        Failures are counted in `tally`, and reported together.
        """
        result = self._contained(samples)
        self.tally.add(samples, result.value, result.status)
        return result

    def _contained(self, samples: Sequence[Sample]) -> RewardResult:
        parts_before = [(part, part.tally.copy()) for part in self.with_parts() if part is not self]
        try:
            return self._checked(samples)
        except Exception as error:
            if len(samples) == 1:
                self.tally.explain(samples[0], ERROR, f"{type(error).__name__}: {error}")
                return RewardResult([math.nan], [ERROR])
        for part, tally in parts_before:  # they will count these samples again
            part.tally = tally
        parts = [self._contained([sample]) for sample in samples]
        has_answers = any(part.answer for part in parts)
        has_segments = any(part.segments for part in parts)
        return RewardResult(
            value=[part.value[0] for part in parts],
            status=[part.status[0] for part in parts],
            answer=[part.answer[0] if part.answer else None for part in parts] if has_answers else None,
            segments=[part.segments[0] if part.segments else [] for part in parts] if has_segments else None,
        )

    def _checked(self, samples: Sequence[Sample]) -> RewardResult:
        result = self.score(samples)
        if not len(result.value) == len(result.status) == len(samples):
            raise ValueError(
                f"{type(self).__name__}.score returned {len(result.value)} values and {len(result.status)} statuses "
                f"for {len(samples)} samples"
            )
        for sample, segments in zip(samples, result.segments or [], strict=bool(result.segments)):
            ends = [segment.end for segment in segments]
            if ends != sorted(set(ends)) or not all(0 <= end < len(sample.token_ids) for end in ends):
                raise ValueError(
                    f"{type(self).__name__}.score: segments that end at {ends} in a completion of "
                    f"{len(sample.token_ids)} tokens; `end` is an index from 0, and later segments end later"
                )
        bad = [
            math.isinf(value) or (math.isnan(value) and status == OK)
            for value, status in zip(result.value, result.status, strict=True)
        ]
        if any(bad):
            result.value = [math.nan if b else v for b, v in zip(bad, result.value, strict=True)]
            result.status = ["not_finite" if b else s for b, s in zip(bad, result.status, strict=True)]
        return result


def snake_case(name: str) -> str:
    """`MathVerifier` -> `math_verifier`."""
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))
