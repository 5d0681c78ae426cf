"""The SegmentScorer family: the value of one segment of a completion."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from grpo_lightning.plugins.rewards.learned.classifier import Classifier, DType
from grpo_lightning.rewards.reward import Run
from grpo_lightning.types import Question, Sample


class SegmentScorer(ABC):
    """Scores the segments of completions."""

    @abstractmethod
    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        """Returns the value of each segment; NaN where it has none, which leaves the sample out of its group.

        Args:
            samples: The completions.
            segments: The texts of the segments of each completion, one or more, which together are `Sample.text`.
        """

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Reads every question once before the run, and refuses bad ones."""

    def setup(self, run: Run) -> None:
        """Reads weights to `run.device`, if there are any. Called once, before the first sample."""

    def close(self) -> None:
        """Releases worker processes and the like. May be called twice."""


class TokenModel(SegmentScorer):
    """The probability that a token classifier gives at the end of each segment, all segments in one pass.

    The input has the form of TRL's PRMTrainer: each segment without the white space around it, then the separator. The
    score is read at the separator's last token. One label: the sigmoid of its logit. Two: the softmax probability of
    the second.

    Args:
        path: Folder made by `save_pretrained`, or hub id.
        max_length: Longest input in the classifier's tokens; a longer one loses its beginning, and a segment whose end
            is lost gets NaN. None is the most that tokenizer and model allow.
        max_tokens: Tokens in one forward of the classifier, padding included.
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
        self._classifier = Classifier("TokenModel", path, max_tokens, dtype, max_length, trust_remote_code)
        self.separator = separator

    def setup(self, run: Run) -> None:
        self._classifier.load(run.device)

    def close(self) -> None:
        self._classifier.close()

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        encode = self._classifier.tokenizer.encode
        separator = encode(self.separator, add_special_tokens=False)
        inputs, ends_by_sample = [], []
        for sample, segments_of_sample in zip(samples, segments, strict=True):
            ids = encode(sample.prompt.text)
            positions = []
            for segment in segments_of_sample:
                ids += encode(segment.strip(), add_special_tokens=False) + separator
                positions.append(len(ids) - 1)
            num_lost = max(0, len(ids) - self._classifier.longest)
            inputs.append(ids[num_lost:])
            ends_by_sample.append([position - num_lost for position in positions])
        return [
            [_probability(logits[end]) if end >= 0 else math.nan for end in ends]
            for logits, ends in zip(self._classifier.logits(inputs), ends_by_sample, strict=True)
        ]


def _probability(logits: Tensor) -> float:
    """Returns the probability of `right`, from [1] or [2] logits."""
    return float(logits.sigmoid()[0] if len(logits) == 1 else logits.softmax(0)[1])
