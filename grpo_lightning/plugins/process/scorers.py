"""The SegmentScorer family: the value of one segment of a completion."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from grpo_lightning.plugins.learned.classifier import Classifier, DType
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


class TokenModel(SegmentScorer):
    """The probability that a token classifier gives at the end of each segment, all segments in one pass.

    The input has the form of TRL's PRMTrainer: each segment without the white space around it, then the separator. The
    score is read at the separator's last token. One label: the sigmoid of its logit. Two: the softmax probability of
    the second.

    Args:
        path: Folder made by `save_pretrained`, or hub id.
        max_length: Longest input in its tokens; a longer one loses its beginning, and a segment whose end is lost gets
            NaN. None is the most that tokenizer and model allow.
        max_tokens: Its tokens in one forward, padding included.
        dtype: Type of the weights.
        trust_remote_code: Run Python code shipped with the model.
        separator: The text after every segment.
    """

    def __init__(
        self,
        path: str,
        max_length: int | None = None,
        max_tokens: int = 16384,
        dtype: DType = "float32",
        trust_remote_code: bool = False,
        separator: str = "\n",
    ) -> None:
        options = (path, max_tokens, dtype, max_length, trust_remote_code)
        self._classifier = Classifier("TokenModel", *options)
        self.separator = separator

    def setup(self, run: Run) -> None:
        """Reads the model."""
        self._classifier.load(run.device)

    def close(self) -> None:
        """Releases the model."""
        self._classifier.close()

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        """The probability of each segment."""
        encode, longest = self._classifier.tokenizer.encode, self._classifier.longest
        separator = encode(self.separator, add_special_tokens=False)
        inputs, ends = [], []
        for sample, own in zip(samples, segments, strict=True):
            ids, positions = encode(sample.prompt.text), []
            for segment in own:
                ids += encode(segment.strip(), add_special_tokens=False) + separator
                positions.append(len(ids) - 1)
            lost = max(0, len(ids) - longest)
            inputs.append(ids[lost:])
            ends.append([position - lost for position in positions])
        return [
            [_probability(logits[end]) if end >= 0 else math.nan for end in own]
            for logits, own in zip(self._classifier.logits(inputs), ends, strict=True)
        ]


def _probability(logits: Tensor) -> float:
    """The probability of `right`, from [1] or [2] logits."""
    return float(logits.sigmoid()[0] if len(logits) == 1 else logits.softmax(0)[1])
