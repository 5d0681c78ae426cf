"""Classification models of transformers with their own tokenizers; one is a reward, one learns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
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


class Classifier:
    """A classification model of transformers with its own tokenizer, in eval mode. What it needs is read at first use.

    `owner` is the class that has the other arguments: they are as in `SequenceClassifier`.
    """

    def __init__(
        self,
        owner: str,
        path: str,
        max_tokens: int,
        dtype: DType,
        max_length: int | None = None,
        trust_remote_code: bool = False,
        pooling: Pooling = "model",
        kind: Literal["sequence", "token"] = "sequence",
    ) -> None:
        at_least("max_length", max_length, 1, owner)
        at_least("max_tokens", max_tokens, 1, owner)
        self.key, self.path = f"{owner}.path", path
        self.max_tokens = max_tokens
        self.max_length = max_length
        self.pooling = pooling
        self.kind: Literal["sequence", "token"] = kind
        self.device = torch.device("cpu")
        self.options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        self.dtype: torch.dtype = getattr(torch, dtype)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which cuts texts on the left."""
        return pretrained.load(AutoTokenizer, self.path, self.key, truncation_side="left", **self.options)

    @cached_property
    def config(self) -> Any:
        """The configuration, which is read without the weights."""
        return pretrained.load(AutoConfig, self.path, self.key, **self.options)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The weights."""
        architecture = (self.config.architectures or [""])[0]
        if self.kind.capitalize() not in architecture.removesuffix("Classification"):
            raise UsageError(
                f"{self.key}={self.path}: its architecture is {architecture or 'unknown'}; give a model that "
                f"classifies {self.kind}s"
            )
        if self.config.num_labels > (1 if self.kind == "sequence" else 2):
            wanted = "1" if self.kind == "sequence" else "1, or 2 of which the second is `right`"
            raise UsageError(f"{self.key}={self.path}: it has {self.config.num_labels} labels; expected {wanted}")
        model = pretrained.load(CLASSES[self.kind], self.path, self.key, **self.options | {"dtype": self.dtype})
        return model.requires_grad_(False).to(self.device)

    def load(self, device: torch.device) -> None:
        """Reads tokenizer and weights to a device, or moves them there."""
        _ = self.tokenizer
        self.device = device
        self.model.to(device)  # type: ignore[arg-type]

    def close(self) -> None:
        """Releases the weights."""
        vars(self).pop("model", None)

    @property
    def longest(self) -> int:
        """The most tokens of an input."""
        positions = getattr(self.config, "max_position_embeddings", None) or 2**31
        return self.max_length or min(positions, self.tokenizer.model_max_length)

    @property
    def padding(self) -> int | None:
        """The token that inputs are padded with on the right; None is one that no input of the pack contains.

        A score of `model` is read at the last token that is not padding.
        """
        return self.config.pad_token_id if self.pooling == "model" else None

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """The float32 logits of token ids: [B, num_labels] of sequences, [B, longest, num_labels] of tokens."""
        padding, config = self.padding, self.model.config
        if padding is None:
            seen = {token for row in rows for token in row}
            padding = next(token for token in range(config.vocab_size) if token not in seen)
        # A text without any token is read as one token of padding.
        ids = [torch.tensor(row or [padding], dtype=torch.int64) for row in rows]
        input_ids = pad_sequence(ids, batch_first=True, padding_value=padding).to(self.device)
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(self.device)
        saved, config.pad_token_id = config.pad_token_id, padding
        with float32(self.device):
            logits = self.model(input_ids=input_ids, attention_mask=mask).logits.float()
        config.pad_token_id = saved
        return logits

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """The logits of each input, on the CPU: [num_labels], or of tokens [its length, num_labels]."""
        found = [torch.empty(0)] * len(rows)
        for indices in token_budget([len(row) for row in rows], self.max_tokens):
            pack = self.forward([rows[index] for index in indices]).cpu()
            for index, own in zip(indices, pack, strict=True):
                found[index] = own if own.ndim == 1 else own[: len(rows[index])]
        return found


@contextmanager
def float32(device: torch.device) -> Iterator[None]:
    """Computes in float32, whatever precision the trainer has set for the policy."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)


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
        options = (max_tokens, dtype, max_length, trust_remote_code, pooling)
        self._classifier = Classifier(type(self).__name__, path, *options)

    def setup(self, run: Run) -> None:
        """Reads the model."""
        self._classifier.load(run.device)
        if self.chat:
            self._render("question", "answer")

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """The logit. Status `ok`, or `cut` where the model did not read the beginning."""
        if self.chat:
            texts = [self._render(sample.prompt.question.text, sample.turn) for sample in samples]
        else:
            texts = [sample.prompt.text + sample.text for sample in samples]
        encode, longest, special = self._classifier.tokenizer.encode, self._classifier.longest, not self.chat
        ids = [encode(text, add_special_tokens=special) for text in texts]
        cut = [len(own) > longest for own in ids]
        for row, text in enumerate(texts):
            if cut[row]:  # by the tokenizer, which keeps special tokens
                ids[row] = encode(text, add_special_tokens=special, truncation=True, max_length=longest)
        values = [float(logits[0]) for logits in self._classifier.logits(ids)]
        return RewardResult(values, [Status.CUT if is_cut else Status.OK for is_cut in cut])

    def close(self) -> None:
        """Releases the model."""
        self._classifier.close()

    def _render(self, question: str, answer: str) -> str:
        return chat_text(self._classifier.tokenizer, question, answer, key=f"chat=true of {self.name}")


class RewardModel(Classifier):
    """A sequence classifier of transformers with `num_labels=1`, or a causal LM with a new head of one output.

    A new head is 0: before it has learned, it scores every completion the same. The model is always in eval mode.
    """

    def __init__(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32", max_tokens: int = 16384) -> None:
        super().__init__("LearnedReward", path, max_tokens, dtype)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The weights, read at first use."""
        # The first use may be validation, in inference mode, whose tensors could never be trained.
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]), float32(self.device):
            torch.manual_seed(0)
            options = {"num_labels": 1, "dtype": self.dtype, "output_loading_info": True}
            model, found = pretrained.load(AutoModelForSequenceClassification, self.path, self.key, **options)
            for name, parameter in model.named_parameters():
                if name in found["missing_keys"] and parameter.shape[0] == 1:
                    torch.nn.init.zeros_(parameter)
        model.config.pad_token_id = self.padding
        return model.eval().to(self.device)

    @property
    def padding(self) -> int | None:
        """The tokenizer's padding token, unless it is the end token too.

        The score is read at the last token that is not padding. If padding were the end token, the model would not see
        the end, and could not tell completions that ended from those that were cut off.
        """
        padding = self.tokenizer.pad_token_id
        is_known = padding is not None and padding < self.config.vocab_size
        return padding if is_known and padding != self.tokenizer.eos_token_id else None

    def encode(self, prompt: str, completion: str, ended: bool) -> tuple[list[int], bool]:
        """Token ids, and whether the beginning was cut off to fit the context.

        Args:
            prompt: The prompt in the form the model expects, with the special tokens of its chat template.
            completion: Untrusted text: special tokens spelled out in it are read as plain text.
            ended: Whether the completion ended by itself; then the end token follows it.
        """
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        ids += self.tokenizer.encode(completion, add_special_tokens=False, split_special_tokens=True)
        if ended and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        limit = getattr(self.config, "max_position_embeddings", None) or len(ids)
        return ids[-limit:], len(ids) > limit

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """[B] scores of the token ids of B texts; equal texts get equal scores."""
        distinct = sorted({*map(tuple, rows)}, key=lambda row: (len(row), row))
        known = dict(zip(distinct, self.logits(distinct), strict=True))
        return [float(known[tuple(row)]) for row in rows]
