"""What one segment of a completion is worth: the SegmentScorer family."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from grpo_lightning.rewards.base import Run
from grpo_lightning.rewards.process.equations import verdicts
from grpo_lightning.rewards.verifier.extraction import extract_answer, whole_turn
from grpo_lightning.rewards.verifier.reading import number, same_number
from grpo_lightning.types import Question, Sample, UsageError


class SegmentScorer(ABC):
    """Scores the segments of completions."""

    @abstractmethod
    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        """The value of each segment; NaN where it has none, which leaves the sample out of its group.

        Args:
            samples: The completions.
            segments: The texts of their segments, one or more each, which together are `Sample.text`.
        """

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Sees every question once before the run."""

    def setup(self, run: Run) -> None:
        """Called once per run, before the first sample: reads weights to `run.device`, if there are any."""

    def close(self) -> None:
        """Releases what it holds. May be called twice."""


class ArithmeticSegments(SegmentScorer):
    """1 for a segment whose equations are all true, 0 for one with an equation that is not. See `equations.verdicts`.

    It checks that what is said is true, not that it is to the point: `1+1=2` is a right segment of any solution.

    Args:
        no_equation: Value of a segment without an equation. Above 0 it pays for prose, under `reduce: min` 0 makes
            every completion with such a segment worth 0.
        check_answer: The last segment is judged by the final answer too: it is right if that has the value of the gold
            answer, and has no false equation. Then the segments alone say what is right.
    """

    def __init__(self, no_equation: float = 0.0, check_answer: bool = False) -> None:
        self.no_equation = no_equation
        self.check_answer = check_answer

    def read_questions(self, questions: Sequence[Question]) -> None:
        """With `check_answer`, complains about a gold answer that is no number."""
        bad = [question for question in questions if self.check_answer and number(question.answer) is None]
        if bad:
            raise UsageError(
                f"check_answer of ArithmeticSegments: the gold answer {bad[0].answer[:80]!r} of "
                f"{bad[0].source or 'a question'} is no number; set it to false and put MathVerifier into the list"
            )

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        values = [[self._value(segment) for segment in own] for own in segments]
        if self.check_answer:
            for sample, own, scores in zip(samples, segments, values, strict=True):
                scores[-1] = float(_has_gold_answer(sample) and all(verdicts(own[-1])))
        return values

    def _value(self, segment: str) -> float:
        found = list(verdicts(segment))
        return float(all(found)) if found else self.no_equation


def _has_gold_answer(sample: Sample) -> bool:
    return same_number(sample.answer, extract_answer(whole_turn(sample)) or "")
