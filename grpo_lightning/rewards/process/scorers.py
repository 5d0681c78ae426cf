"""What one step of a completion is worth: the StepVerifier family."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from grpo_lightning.rewards.base import Run
from grpo_lightning.rewards.process.equations import verdicts
from grpo_lightning.rewards.verifier.extraction import extract_answer, whole_turn
from grpo_lightning.rewards.verifier.reading import number, same_number
from grpo_lightning.types import Question, Sample, UsageError


class StepVerifier(ABC):
    """Scores the steps of completions."""

    @abstractmethod
    def score(self, samples: Sequence[Sample], steps: Sequence[Sequence[str]]) -> list[list[float]]:
        """The value of each step; NaN where it has none, which leaves the sample out of its group.

        Args:
            samples: The completions.
            steps: The texts of their steps, one or more each, which together are `Sample.text`.
        """

    def prepare(self, questions: Sequence[Question]) -> None:
        """Sees every question once before the run."""

    def setup(self, run: Run) -> None:
        """Called once per run, before the first sample: reads weights to `run.device`, if there are any."""

    def close(self) -> None:
        """Releases what it holds. May be called twice."""


class ArithmeticSteps(StepVerifier):
    """1 for a step whose equations are all true, 0 for one with an equation that is not. See `equations.verdicts`.

    It checks that what is said is true, not that it is to the point: `1+1=2` is a right step of any solution.

    Args:
        no_equation: Value of a step without an equation. Above 0 it pays for prose, under `step_reduce: min` 0 makes
            every completion with such a step worth 0.
        check_answer: The last step is judged by the final answer too: it is right if that has the value of the gold
            answer, and has no false equation. Then the steps alone say what is right.
    """

    def __init__(self, no_equation: float = 0.0, check_answer: bool = False) -> None:
        self.no_equation = no_equation
        self.check_answer = check_answer

    def prepare(self, questions: Sequence[Question]) -> None:
        """With `check_answer`, complains about a gold answer that is no number."""
        bad = [question for question in questions if self.check_answer and number(question.answer) is None]
        if bad:
            raise UsageError(
                f"check_answer of ArithmeticSteps: the gold answer {bad[0].answer[:80]!r} of "
                f"{bad[0].source or 'a question'} is no number; set it to false and put MathVerifier into the list"
            )

    def score(self, samples: Sequence[Sample], steps: Sequence[Sequence[str]]) -> list[list[float]]:
        values = [[self._value(step) for step in own] for own in steps]
        if self.check_answer:
            for sample, own, scores in zip(samples, steps, values, strict=True):
                scores[-1] = float(_has_gold_answer(sample) and all(verdicts(own[-1])))
        return values

    def _value(self, step: str) -> float:
        found = list(verdicts(step))
        return float(all(found)) if found else self.no_equation


def _has_gold_answer(sample: Sample) -> bool:
    return same_number(sample.answer, extract_answer(whole_turn(sample)) or "")
