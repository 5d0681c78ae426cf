"""Classification models of transformers with their own tokenizers; one scores segments, one learns."""

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
from grpo_lightning.policy.rope import context_length, fix_frequencies
from grpo_lightning.types import UsageError, at_least

DType = Literal["float32", "bfloat16", "float16"]


class Classifier:
    """A classification model of transformers with its own tokenizer, in eval mode. Each file is read at its first use.

    Args:
        owner: The class of the reward or scorer whose arguments the other ones are; messages name it.
        path: Folder made by `save_pretrained`, or hub id.
        max_tokens: Tokens in one forward, padding included.
        dtype: Type of the weights.
        max_length: Longest input in tokens; None is the most that tokenizer and model allow.
        trust_remote_code: Run Python code shipped with the model.
    """

    padding: int | None = None
    """The token that inputs are padded with on the right; None is a token that no input of the micro-batch contains."""

    def __init__(
        self,
        owner: str,
        path: str,
        max_tokens: int,
        dtype: DType,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        at_least("max_length", max_length, 1, owner)
        at_least("max_tokens", max_tokens, 1, owner)
        self.key = f"{owner}.path"
        self.path = path
        self.max_tokens = max_tokens
        self.max_length = max_length
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
        """The weights of a classifier of tokens."""
        architecture = (self.config.architectures or ["unknown"])[0]
        if not architecture.endswith("TokenClassification"):
            raise UsageError(
                f"{self.key}={self.path}: its architecture is {architecture}; give one that classifies tokens"
            )
        num_labels = self.config.num_labels
        if num_labels > 2:
            raise UsageError(
                f"{self.key}={self.path}: it has {num_labels} labels; expected 1, or 2 of which the second is `right`"
            )
        options = self.options | {"dtype": self.dtype}
        model = pretrained.load(AutoModelForTokenClassification, self.path, self.key, **options)
        fix_frequencies(model)
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
        """The largest number of tokens of an input."""
        positions = context_length(self.config) or 2**31
        return self.max_length or min(positions, self.tokenizer.model_max_length)

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B, num_labels] float32 logits of sequences, or [B, longest, num_labels] of tokens, from token ids."""
        config = self.model.config
        padding = self.padding
        if padding is None:
            input_tokens = {token for row in rows for token in row}
            padding = next(token for token in range(config.vocab_size) if token not in input_tokens)

        # A text without any token is read as one token of padding.
        ids = [torch.tensor(row or [padding], dtype=torch.int64) for row in rows]
        input_ids = pad_sequence(ids, batch_first=True, padding_value=padding).to(self.device)
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(self.device)

        # The model finds the last token of a sequence by this id.
        saved_id = config.pad_token_id
        config.pad_token_id = padding
        with float32(self.device):
            logits = self.model(input_ids=input_ids, attention_mask=mask).logits.float()
        config.pad_token_id = saved_id
        return logits

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """[num_labels] logits of each input on the CPU, or of tokens [its length, num_labels]."""
        logits = [torch.empty(0)] * len(rows)
        for indices in token_budget([len(row) for row in rows], self.max_tokens):
            micro_batch = self.forward([rows[index] for index in indices]).cpu()
            for index, logits_of_row in zip(indices, micro_batch, strict=True):
                logits[index] = logits_of_row if logits_of_row.ndim == 1 else logits_of_row[: len(rows[index])]
        return logits


@contextmanager
def float32(device: torch.device) -> Iterator[None]:
    """Computes in float32, though the trainer may have set another precision for the policy."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)


class RewardModel(Classifier):
    """A sequence classifier of transformers with `num_labels=1`, or a causal LM with a new head of one output.

    A new head is 0: before it has learned, it scores every completion the same. The model is always in eval mode.

    Args:
        path: Folder made by `save_pretrained`, or hub id.
        dtype: Type of the weights.
        max_tokens: Tokens in one forward, padding included.
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
            model, loading_info = pretrained.load(AutoModelForSequenceClassification, self.path, self.key, **options)
            for name, parameter in model.named_parameters():
                if name in loading_info["missing_keys"] and parameter.shape[0] == 1:
                    torch.nn.init.zeros_(parameter)
        fix_frequencies(model)
        model.config.pad_token_id = self.padding
        return model.eval().to(self.device)

    @property
    def padding(self) -> int | None:  # type: ignore[override]
        """The tokenizer's padding token, unless it is the end token too.

        The score is read at the last token that is not padding. If padding were the end token, the model would not see
        the end, and could not tell finished completions from completions that were cut off.
        """
        padding = self.tokenizer.pad_token_id
        is_known = padding is not None and padding < self.config.vocab_size
        return padding if is_known and padding != self.tokenizer.eos_token_id else None

    def encode(self, prompt: str, completion: str, has_ended: bool) -> tuple[list[int], bool]:
        """Returns token ids, and whether the beginning was cut off to fit the context.

        Args:
            prompt: The prompt in the form the model expects, with the special tokens of its chat template.
            completion: Untrusted text: special tokens spelled out in it are read as plain text.
            has_ended: Whether the completion ended by itself; then the end token follows it.
        """
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        ids += self.tokenizer.encode(completion, add_special_tokens=False, split_special_tokens=True)
        if has_ended and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        limit = context_length(self.config) or len(ids)
        return ids[-limit:], len(ids) > limit

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """[B] scores of the token ids of B texts; equal texts get equal scores."""
        distinct = sorted({*map(tuple, rows)}, key=lambda row: (len(row), row))
        logits_by_row = dict(zip(distinct, self.logits(distinct), strict=True))
        return [float(logits_by_row[tuple(row)]) for row in rows]
