"""r_φ: a sequence classifier with one output that reads prompt and completion."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from grpo_lightning.plugins.learned.classifier import Classifier, float32
from grpo_lightning.policy import pretrained


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
