"""r_φ: a sequence classifier with one output that reads prompt and completion."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

import torch
import transformers.utils.logging
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

from grpo_lightning.maths.ragged import token_budget
from grpo_lightning.policy import pretrained
from grpo_lightning.types import at_least

log = logging.getLogger(__name__)

PADDING = "<|reward_pad|>"
"""The padding token of a tokenizer that has none, or whose padding token is its end token."""

KEY = "LearnedReward.path"


class RewardModel:
    """A sequence classifier of transformers with `num_labels=1`, or a causal LM with a new head of one output.

    A new head is 0: before it has learned, it scores every completion the same. The model is always in eval mode.
    """

    def __init__(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32", max_tokens: int = 16384) -> None:
        at_least("max_tokens", max_tokens, 1, "LearnedReward")
        self.path = path
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.max_tokens = max_tokens
        self.device = torch.device("cpu")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its own tokenizer, whose padding token is not its end token.

        The score is read at the last token that is not padding. If padding were the end token, the model would not see
        the end, and could not tell completions that ended from those that were cut off.
        """
        tokenizer = pretrained.load(AutoTokenizer, self.path, KEY)
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            tokenizer.add_special_tokens({"pad_token": PADDING})
        return tokenizer

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration, which is read without the weights."""
        return pretrained.load(AutoConfig, self.path, KEY)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The weights, read at first use."""
        verbosity = transformers.utils.logging.get_verbosity()
        transformers.utils.logging.set_verbosity_error()
        try:
            # The first use may be validation, in inference mode, whose tensors could never be trained.
            with torch.inference_mode(False), torch.random.fork_rng(devices=[]), float32(self.device):
                torch.manual_seed(0)
                options = {"num_labels": 1, "dtype": self.dtype, "output_loading_info": True}
                model, found = pretrained.load(AutoModelForSequenceClassification, self.path, KEY, **options)
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
        """Moves the weights, now or when they are read."""
        self.device = device
        if "model" in vars(self):
            torch.nn.Module.to(self.model, device)

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

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B] float32 scores of the token ids of B texts, with gradients where these are enabled."""
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
        """[B] scores of the token ids of B texts; equal texts get equal scores."""
        distinct = sorted({*map(tuple, rows)}, key=lambda row: (len(row), row))
        known: dict[tuple[int, ...], float] = {}
        for indices in token_budget([len(row) for row in distinct], self.max_tokens):
            pack = [distinct[index] for index in indices]
            known |= zip(pack, self.forward(pack).tolist(), strict=True)
        return [known[tuple(row)] for row in rows]


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
