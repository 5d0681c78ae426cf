"""Learned process models: the probability that a segment leads to the right answer."""

import math
from collections.abc import Sequence
from typing import Any

from grpo_lightning.plugins.learned.classifier import Classifier, DType
from grpo_lightning.plugins.process.scorers import SegmentScorer
from grpo_lightning.rewards.base import Run
from grpo_lightning.types import Sample, UsageError, at_least


class _SegmentModel(SegmentScorer):
    """The common part of the two: the model, which is read before the run or at the first call."""

    kind: Any = "sequence"

    def __init__(
        self,
        path: str,
        max_length: int | None = None,
        max_tokens: int = 16384,
        dtype: DType = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        at_least("max_length", max_length, 1, type(self).__name__)
        at_least("max_tokens", max_tokens, 1, type(self).__name__)
        self.path = path
        self._options: dict[str, Any] = {
            "max_length": max_length,
            "max_tokens": max_tokens,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
        }
        self._classifier: Classifier | None = None

    def setup(self, run: Run) -> None:
        """Reads the model."""
        self._load(run.device)

    def close(self) -> None:
        """Releases the model."""
        self._classifier = None

    def _load(self, device: Any = "cpu") -> Classifier:
        if self._classifier is None:
            owner = type(self).__name__
            classifier = Classifier(self.path, device=device, kind=self.kind, owner=owner, **self._options)
            if classifier.num_labels > 2:
                raise UsageError(
                    f"{owner}.path={self.path}: it has {classifier.num_labels} labels; expected 1, or 2 of which the "
                    "second is `right`"
                )
            self._classifier = classifier
        return self._classifier


class PrefixModel(_SegmentModel):
    """The probability that a sequence classifier gives to the prompt and the completion up to the segment's end.

    One label: the sigmoid of its logit. Two: the softmax probability of the second. Use it with the model you have;
    `tools/label_segments.py` writes data to train one. It reads every prefix again: `TokenModel` is faster.

    Args:
        path: `AutoModelForSequenceClassification`: folder made by `save_pretrained`, or hub id.
        max_length: Longest input in its tokens; a longer one loses its beginning. None is the most that tokenizer and
            model allow.
        max_tokens: Its tokens in one forward, padding included.
        dtype: Type of the weights.
        trust_remote_code: Run Python code shipped with the model.
    """

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        """The probability of each segment."""
        classifier = self._load()
        prefixes = [
            sample.prompt.text + "".join(own[: segment + 1])
            for sample, own in zip(samples, segments, strict=True)
            for segment in range(len(own))
        ]
        scores = iter(_probability(logits) for logits in classifier.logits(classifier.encode(prefixes)[0]))
        return [[next(scores) for _ in own] for own in segments]


class TokenModel(_SegmentModel):
    """The probability that a token classifier gives at the end of each segment, all segments in one pass.

    The input has the form of TRL's PRMTrainer: each segment without the white space around it, then the separator. The
    score is read at the separator's last token. One label: the sigmoid of its logit. Two: the softmax probability of
    the second.

    Args:
        path: `AutoModelForTokenClassification`: folder made by `save_pretrained`, or hub id.
        separator: The text after every segment.
        max_length: Longest input in its tokens; a longer one loses its beginning, and a segment whose end is lost gets
            NaN. None is the most that tokenizer and model allow.
        max_tokens: Its tokens in one forward, padding included.
        dtype: Type of the weights.
        trust_remote_code: Run Python code shipped with the model.
    """

    kind = "token"

    def __init__(
        self,
        path: str,
        separator: str = "\n",
        max_length: int | None = None,
        max_tokens: int = 16384,
        dtype: DType = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(
            path,
            max_length=max_length,
            max_tokens=max_tokens,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        self.separator = separator

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        """The probability of each segment."""
        classifier = self._load()
        encode = classifier.tokenizer.encode
        separator = encode(self.separator, add_special_tokens=False)
        inputs, ends = [], []
        for sample, own in zip(samples, segments, strict=True):
            ids, positions = encode(sample.prompt.text), []
            for segment in own:
                ids += encode(segment.strip(), add_special_tokens=False) + separator
                positions.append(len(ids) - 1)
            lost = max(0, len(ids) - classifier.max_length)
            inputs.append(ids[lost:])
            ends.append([position - lost for position in positions])
        return [
            [_probability(logits[end]) if end >= 0 else math.nan for end in own]
            for logits, own in zip(classifier.logits(inputs), ends, strict=True)
        ]


def _probability(logits: Any) -> float:
    """The probability of `right`, from [1] or [2] logits."""
    return float(logits.sigmoid()[0] if len(logits) == 1 else logits.softmax(0)[1])
