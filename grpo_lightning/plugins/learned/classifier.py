"""A sequence-classification model as a reward, used as it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from grpo_lightning.maths.ragged import token_budget
from grpo_lightning.policy import pretrained
from grpo_lightning.policy.chat import chat_text
from grpo_lightning.rewards.base import Reward, Run
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.types import Sample, Status, UsageError, at_least

DType = Literal["float32", "bfloat16", "float16"]
Pooling = Literal["model", "last"]
CLASSES = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}


@dataclass
class Classifier:
    """A classification model of transformers with its own tokenizer, in eval mode and without gradients.

    It is read by `load`, before the run, and released by `close`. `owner` is the class that has the other arguments:
    they are as in `SequenceClassifier`.
    """

    owner: str
    path: str
    max_length: Any
    max_tokens: int
    dtype: DType
    trust_remote_code: bool
    pooling: Pooling = "model"
    kind: Literal["sequence", "token"] = "sequence"
    max_labels: int = 1

    def __post_init__(self) -> None:
        at_least("max_length", self.max_length, 1, self.owner)
        at_least("max_tokens", self.max_tokens, 1, self.owner)
        self.model: PreTrainedModel | None = None

    def load(self, device: Any = "cpu") -> "Classifier":
        """Reads the model, unless it is there already."""
        if self.model is not None:
            return self
        key, options = f"{self.owner}.path", {"trust_remote_code": self.trust_remote_code}
        self.tokenizer: Any = pretrained.load(AutoTokenizer, self.path, key, truncation_side="left", **options)
        config = pretrained.load(AutoConfig, self.path, key, **options)
        architecture = (config.architectures or [""])[0]
        if self.kind.capitalize() not in architecture.removesuffix("Classification"):
            raise UsageError(
                f"{key}={self.path}: its architecture is {architecture or 'unknown'}; give a model that "
                f"classifies {self.kind}s"
            )
        if config.num_labels > self.max_labels:
            wanted = "1" if self.max_labels == 1 else "1, or 2 of which the second is `right`"
            raise UsageError(f"{key}={self.path}: it has {config.num_labels} labels; expected {wanted}")
        options |= {"dtype": getattr(torch, self.dtype)}
        self.model = pretrained.load(CLASSES[self.kind], self.path, key, **options).requires_grad_(False).to(device)
        positions = getattr(config, "max_position_embeddings", None) or 2**31
        self.max_length = self.max_length or min(positions, self.tokenizer.model_max_length)
        self.pad_token_id = config.pad_token_id if self.pooling == "model" else None
        return self

    def close(self) -> None:
        """Releases the model."""
        self.model = None

    def logits(self, inputs: Sequence[list[int]]) -> list[Tensor]:
        """The float32 logits of each input, on the CPU: [num_labels] of a sequence, [its length, num_labels] of tokens.

        Inputs are packed by length, padded on the right and masked.
        """
        assert self.model is not None
        found = [torch.empty(0)] * len(inputs)
        for rows in token_budget([len(ids) for ids in inputs], self.max_tokens):
            ids = [torch.tensor(inputs[row], dtype=torch.int64) for row in rows]
            pad = self.pad_token_id
            if pad is None:  # a token that no input contains, which becomes the model's pad token
                seen = {token for row in rows for token in inputs[row]}
                pad = next(token for token in range(self.model.config.vocab_size) if token not in seen)
                self.model.config.pad_token_id = pad
            padded = pad_sequence(ids, batch_first=True, padding_value=pad).to(self.model.device)
            mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(self.model.device)
            with torch.no_grad(), torch.autocast(self.model.device.type, enabled=False):
                logits = self.model(input_ids=padded, attention_mask=mask).logits.float().cpu()
            for own, row in zip(logits, rows, strict=True):
                found[row] = own if own.ndim == 1 else own[: len(inputs[row])]
        return found

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> tuple[list[list[int]], list[bool]]:
        """The token ids of each text, and whether its beginning was cut off because the text was too long."""
        options = {"add_special_tokens": add_special_tokens}
        ids = [self.tokenizer(text, **options)["input_ids"] for text in texts]
        cut = [len(own) > self.max_length for own in ids]
        options |= {"truncation": True, "max_length": self.max_length}  # this keeps special tokens
        rows = zip(texts, ids, cut, strict=True)
        return [self.tokenizer(text, **options)["input_ids"] if is_cut else own for text, own, is_cut in rows], cut


class SequenceClassifier(Reward):
    """The score of a reward model, used as it is: `AutoModelForSequenceClassification` with one label.

    Use it for answers that no rule can verify. It reads prompt and completion as text, with its own tokenizer. An input
    that is too long loses its beginning.

    Args:
        path: Folder made by `save_pretrained`, or hub id.
        chat: Render question and completion as two turns of its own chat template, as most open reward models expect.
            Otherwise it reads the prompt as the policy saw it, followed by the completion.
        max_length: Longest input in its tokens; None is the most that tokenizer and model allow.
        max_tokens: Its tokens in one forward, padding included.
        pooling: The token at which a decoder's score is read. `model`: the last one that is not its pad token, as in
            transformers. If its pad token is its end token, it never sees the end, and cannot tell completions that
            ended from those that were cut off. `last`: the last token, for a model that was trained so.
        dtype: Type of the weights; the score is float32.
        trust_remote_code: Run Python code shipped with the model. Leave it off for models you have not read.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics.

    Raises:
        UsageError: Before the run starts: there is no such model, it has several labels, or no chat template.
    """

    def __init__(
        self,
        path: str,
        chat: bool = False,
        max_length: int | None = None,
        max_tokens: int = 16384,
        pooling: Pooling = "model",
        dtype: DType = "float32",
        trust_remote_code: bool = False,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        self.chat = chat
        owner = type(self).__name__
        self._classifier = Classifier(owner, path, max_length, max_tokens, dtype, trust_remote_code, pooling)

    def setup(self, run: Run) -> None:
        """Reads the model."""
        self._classifier.load(run.device)
        if self.chat:
            self._render("question", "answer")

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """The logit. Status `ok`, or `cut` where the model did not read the beginning."""
        classifier = self._classifier.load()
        if self.chat:
            texts = [self._render(sample.prompt.question.text, sample.turn) for sample in samples]
        else:
            texts = [sample.prompt.text + sample.text for sample in samples]
        ids, cut = classifier.encode(texts, add_special_tokens=not self.chat)
        values = [float(logits[0]) for logits in classifier.logits(ids)]
        return RewardResult(values, [Status.CUT if is_cut else Status.OK for is_cut in cut])

    def close(self) -> None:
        """Releases the model."""
        self._classifier.close()

    def _render(self, question: str, answer: str) -> str:
        return chat_text(self._classifier.tokenizer, question, answer, key=f"chat=true of {self.name}")
