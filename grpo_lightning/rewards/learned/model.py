"""r_φ: a sequence classifier with one output that reads prompt and completion."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import transformers.utils.logging
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_lightning.rewards.classifier import length_batches
from grpo_lightning.types import UsageError

log = logging.getLogger(__name__)

PADDING = "<|reward_pad|>"
"""The padding token of a tokenizer that has none of its own."""

MEND = "Give a folder made by save_pretrained (config.json, weights, tokenizer) or a hub id"


class RewardModel:
    """A sequence classifier of transformers with `num_labels=1`, or a causal LM that gets a new head of one output.

    A new head is 0: before it has learned, every completion gets the same score. The model is always in eval mode.

    Args:
        path: Folder made by `save_pretrained`, or a model id of the Hugging Face hub.
        dtype: Type of the weights; scores are float32.
        max_tokens: Tokens in one forward or backward, padding included.
    """

    def __init__(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32", max_tokens: int = 16384) -> None:
        if max_tokens < 1:
            raise UsageError(f"max_tokens={max_tokens} of LearnedReward: give 1 or more")
        self.path = path
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.max_tokens = max_tokens
        self.device = torch.device("cpu")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its own tokenizer, with a padding token of its own.

        The score is read at the last token that is no padding: if padding were the end token, that would be before
        the end, and a completion that ended and one that was cut off would look alike.
        """
        tokenizer = self._from_pretrained(AutoTokenizer)
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            tokenizer.add_special_tokens({"pad_token": PADDING})
        return tokenizer

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration, known before the weights are."""
        return self._from_pretrained(AutoConfig)

    @property
    def context_length(self) -> int | None:
        """Longest sequence it reads, or None where it sets no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The weights, read at the first use."""
        verbosity = transformers.utils.logging.get_verbosity()
        transformers.utils.logging.set_verbosity_error()
        try:
            # Validation may be the first to ask, in inference mode, whose tensors could never be trained.
            with torch.inference_mode(False), torch.random.fork_rng(devices=[]), float32(self.device):
                torch.manual_seed(0)
                model, found = self._from_pretrained(
                    AutoModelForSequenceClassification, num_labels=1, dtype=self.dtype, output_loading_info=True
                )
                new = set(found["missing_keys"])
                for name, parameter in model.named_parameters():
                    if name in new and parameter.shape[0] == 1:
                        torch.nn.init.zeros_(parameter)
                if len(self.tokenizer) > model.get_input_embeddings().weight.shape[0]:
                    model.resize_token_embeddings(len(self.tokenizer), mean_resizing=False)
        finally:
            transformers.utils.logging.set_verbosity(verbosity)
        if new:
            log.info("reward model %s: new weights for %s", self.path, ", ".join(sorted(new)))
        model.config.pad_token_id = self.tokenizer.pad_token_id
        return model.eval().to(self.device)

    def to(self, device: torch.device) -> None:
        """Where to compute."""
        self.device = device
        if "model" in vars(self):
            torch.nn.Module.to(self.model, device)

    def check(self) -> None:
        """Raises UsageError for what `path` lacks, before any weight is read."""
        _ = self.config, self.tokenizer

    def _from_pretrained(self, auto_class: Any, **kwargs: Any) -> Any:
        path = Path(self.path).expanduser()
        if (self.path.startswith((".", "/", "~")) or self.path.count("/") > 1) and not path.is_dir():
            raise UsageError(f"path={self.path} of LearnedReward: no such folder (looked in {Path.cwd()}). {MEND}")
        try:
            return auto_class.from_pretrained(str(path) if path.is_dir() else self.path, **kwargs)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(
                f"path={self.path} of LearnedReward: {auto_class.__name__} found no usable model there ({reason}). "
                f"{MEND}"
            ) from error

    def encode(self, prompt: str, completion: str, ended: bool) -> tuple[list[int], bool]:
        """Token ids, and whether the beginning was cut off to fit the context.

        Args:
            prompt: As the model wants it, with the special tokens of its chat template.
            completion: Untrusted: special tokens spelled out in it are read as plain text.
            ended: Whether the completion ended by itself; then the end token stands behind it.
        """
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        ids += self.tokenizer.encode(completion, add_special_tokens=False, split_special_tokens=True)
        if ended and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        limit = self.context_length or len(ids)
        return ids[-limit:], len(ids) > limit

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Token ids of B texts -> [B] float32 scores, with gradient where gradients are on."""
        padding = self.model.config.pad_token_id
        # A text without any token is read as one token of padding.
        ids = [torch.tensor(row or [padding], dtype=torch.int64) for row in rows]
        input_ids = pad_sequence(ids, batch_first=True, padding_value=padding)
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        with float32(self.device):
            output = self.model(input_ids=input_ids.to(self.device), attention_mask=mask.to(self.device))
        return output.logits[:, 0].float()

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Scores of B texts; equal texts get equal scores."""
        keys = [tuple(row) for row in rows]
        distinct = sorted(set(keys), key=lambda row: (len(row), row))
        known: dict[tuple[int, ...], float] = {}
        for batch in batches_of(distinct, self.max_tokens):
            known |= zip(batch, self.forward(batch).tolist(), strict=True)
        return [known[key] for key in keys]

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes weights and tokenizer as transformers reads them."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def batches_of(rows: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """`rows`, sorted by length, in batches of at most `max_tokens` with padding; at least one row each."""
    for batch in length_batches([len(row) for row in rows], max_tokens):
        yield [rows[place] for place in batch]


@contextmanager
def float32(device: torch.device) -> Iterator[None]:
    """Without the precision that the trainer may have set for the policy around it."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)
