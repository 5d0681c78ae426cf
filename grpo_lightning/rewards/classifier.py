"""A sequence-classification model as a reward, used as it is."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo_lightning.rewards.base import OK, Reward, RewardResult, Run
from grpo_lightning.types import Sample, UsageError

# torch and transformers are imported where they are used: workers that import the package need not wait for them.

CUT = "cut"
DType = Literal["float32", "bfloat16", "float16"]
Pooling = Literal["model", "last"]


class Classifier:
    """A classification model of transformers with its own tokenizer, in eval mode and without gradients.

    Args:
        path: Folder made by `save_pretrained`, or hub id.
        kind: What it classifies, whole texts or each of their tokens.
        device: Where to.
        dtype: Type of the weights.
        max_length: Longest input in tokens; None is what tokenizer and model allow.
        max_tokens: Tokens in one forward, padding included.
        pooling: At which token a decoder's score of a sequence is read. `model`: as transformers does, at the last one
            that is not `config.pad_token_id`. `last`: at the last one of the input.
        trust_remote_code: Run Python code shipped with the model.

    Raises:
        UsageError: There is no such model.
    """

    def __init__(
        self,
        path: str,
        kind: Literal["sequence", "token"] = "sequence",
        device: Any = "cpu",
        dtype: DType = "float32",
        max_length: int | None = None,
        max_tokens: int = 16384,
        pooling: Pooling = "model",
        trust_remote_code: bool = False,
    ) -> None:
        import torch
        from transformers import (
            AutoConfig,
            AutoModelForSequenceClassification,
            AutoModelForTokenClassification,
            AutoTokenizer,
        )

        model_class = AutoModelForSequenceClassification if kind == "sequence" else AutoModelForTokenClassification
        folder = Path(path).expanduser()
        source = str(folder) if folder.is_dir() else path
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
            architecture = (config.architectures or [""])[0]
            if kind.capitalize() not in architecture.removesuffix("Classification"):
                raise ValueError(f"its head is not one that classifies {kind}s but {architecture or 'unknown'}")
            self.model: Any = model_class.from_pretrained(
                source, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"path={path!r}: {str(error).strip().splitlines()[0]}") from error
        self.model.eval().requires_grad_(False).to(device)
        positions = getattr(config, "max_position_embeddings", None) or 2**31
        self.max_length = max_length or min(positions, self.tokenizer.model_max_length)
        self.max_tokens = max_tokens
        self.pad_token_id = config.pad_token_id if pooling == "model" else None

    @property
    def num_labels(self) -> int:
        return self.model.config.num_labels

    def logits(self, inputs: Sequence[list[int]]) -> list[Any]:
        """The float32 logits of each input, on the CPU: [num_labels] of a sequence, [its length, num_labels] of tokens.

        Inputs are batched by length, padded on the right and masked.
        """
        import torch

        found: list[Any] = [None] * len(inputs)
        for rows in length_batches([len(ids) for ids in inputs], self.max_tokens):
            longest = max(len(inputs[row]) for row in rows)
            pad = self._pad([inputs[row] for row in rows])
            ids = torch.tensor([inputs[row] + [pad] * (longest - len(inputs[row])) for row in rows])
            mask = torch.tensor([[1] * len(inputs[row]) + [0] * (longest - len(inputs[row])) for row in rows])
            device = self.model.device
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float().cpu()
            for place, row in enumerate(rows):
                found[row] = logits[place] if logits.ndim == 2 else logits[place, : len(inputs[row])]
        return found

    def _pad(self, inputs: Sequence[list[int]]) -> int:
        """The model's pad token. Where it has none, a token that no input contains: the model takes it for padding."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        seen = set().union(*inputs)
        pad = next(token for token in range(self.model.config.vocab_size) if token not in seen)
        self.model.config.pad_token_id = pad
        return pad

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> tuple[list[list[int]], list[bool]]:
        """Token ids of each text, and whether its beginning had to go because it was too long."""
        ids = [self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"] for text in texts]
        cut = [len(own) > self.max_length for own in ids]
        self.tokenizer.truncation_side = "left"
        for row, is_cut in enumerate(cut):
            if is_cut:  # by the tokenizer, which keeps its special tokens
                ids[row] = self.tokenizer(
                    texts[row], add_special_tokens=add_special_tokens, truncation=True, max_length=self.max_length
                )["input_ids"]
        return ids, cut


class SequenceClassifier(Reward):
    """The score of a reward model, used as it is: `AutoModelForSequenceClassification` with one label.

    It reads prompt and completion as text, with its own tokenizer. An input that is too long loses its beginning.

    Args:
        path: Folder made by `save_pretrained`, or hub id.
        chat: Give it question and completion as two turns in its own chat template, as most open reward models want it.
            Otherwise it gets the prompt as the policy saw it, and the completion behind it.
        max_length: Longest input in its tokens; None is what tokenizer and model allow.
        max_tokens: Its tokens in one forward, padding included.
        pooling: At which token a decoder's score is read. `model`: as transformers does, at the last one that is not
            its pad token. If that is its end token too, it never sees the end, and what ended and what was cut off
            look alike. `last`: at the last token, for a model that was trained so.
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
        if max_tokens < 1 or (max_length is not None and max_length < 1):
            raise UsageError(f"max_length={max_length}, max_tokens={max_tokens} of {self.name}: give 1 or more")
        self.path = path
        self.chat = chat
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "max_length": max_length,
            "max_tokens": max_tokens,
            "pooling": pooling,
            "trust_remote_code": trust_remote_code,
        }
        self._classifier: Classifier | None = None

    def setup(self, run: Run) -> None:
        """Reads the model."""
        self._load(run.device)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """The logit. Status `ok`, or `cut` where the model did not see the beginning."""
        classifier = self._load()
        texts = [self._input(classifier, sample) for sample in samples]
        ids, cut = classifier.encode(texts, add_special_tokens=not self.chat)
        values = [float(logits[0]) for logits in classifier.logits(ids)]
        return RewardResult(values, [CUT if is_cut else OK for is_cut in cut])

    def close(self) -> None:
        """Lets go of the model."""
        self._classifier = None

    def _input(self, classifier: Classifier, sample: Sample) -> str:
        if not self.chat:
            return sample.prompt.text + sample.text
        turns = [
            {"role": "user", "content": sample.prompt.question.text},
            {"role": "assistant", "content": sample.text},
        ]
        return classifier.tokenizer.apply_chat_template(turns, tokenize=False)

    def _load(self, device: Any = "cpu") -> Classifier:
        if self._classifier is None:
            classifier = Classifier(self.path, device=device, **self._options)
            if classifier.num_labels != 1:
                raise UsageError(
                    f"path={self.path!r} of {self.name}: it has {classifier.num_labels} labels, expected 1"
                )
            if self.chat and not classifier.tokenizer.chat_template:
                raise UsageError(
                    f"path={self.path!r} of {self.name}: its tokenizer has no chat template; set chat=false"
                )
            self._classifier = classifier
        return self._classifier


def length_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Rows in order of length, as many at once as fit `max_tokens` when padded; one at least."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and lengths[row] * (len(rows) + 1) > max_tokens:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
