"""The SegmentScorer family: the value of one segment of a completion."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from grpo_lightning.plugins.process.equations import truths
from grpo_lightning.plugins.verifier.extraction import extract_answer
from grpo_lightning.plugins.verifier.reading import number, same_number
from grpo_lightning.rewards.base import Run
from grpo_lightning.types import Question, Sample, UsageError


class SegmentScorer(ABC):
    """Scores the segments of completions."""

    @abstractmethod
    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        """The value of each segment; NaN where it has none, which leaves the sample out of its group.

        Args:
            samples: The completions.
            segments: The texts of the segments of each, one or more, which together are `Sample.text`.
        """

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Reads every question once before the run, to refuse bad ones."""

    def setup(self, run: Run) -> None:
        """Reads weights to `run.device`, if there are any. Called once, before the first sample."""

    def close(self) -> None:
        """Releases worker processes and the like. May be called twice."""


class ArithmeticSegments(SegmentScorer):
    """1 for a segment whose equations are all true, 0 for a segment with a false equation.

    A process reward without a model, for arithmetic; `equations.truths` defines what counts as an equation. It checks
    that equations are true, not that they are relevant: `1+1=2` is a right segment of any solution.

    Args:
        no_equation: Value of a segment without an equation. Above 0 it pays for prose. With `reduce: min`, 0 makes
            every completion with such a segment worth 0.
        check_answer: Judge the last segment by the final answer too: it is right if that equals the gold answer and
            the segment has no false equation. The process reward can then decide what is right without a verifier.
    """

    def __init__(self, no_equation: float = 0.0, check_answer: bool = False) -> None:
        self.no_equation = no_equation
        self.check_answer = check_answer

    def read_questions(self, questions: Sequence[Question]) -> None:
        """With `check_answer`, refuses a gold answer that is not a number."""
        bad = [question for question in questions if self.check_answer and number(question.answer) is None]
        if bad:
            raise UsageError(
                f"check_answer of ArithmeticSegments: the gold answer {bad[0].answer[:80]!r} of "
                f"{bad[0].source or 'a question'} is not a number; set check_answer=false and give MathVerifier too"
            )

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        """1, 0 or `no_equation` for each segment."""
        values = []
        for sample, own in zip(samples, segments, strict=True):
            found = [[*truths(segment)] for segment in own]
            values.append([float(all(true)) if true else self.no_equation for true in found])
            if self.check_answer:
                answers = same_number(sample.answer, extract_answer(sample.whole_turn) or "")
                values[-1][-1] = float(answers and all(found[-1]))
        return values
