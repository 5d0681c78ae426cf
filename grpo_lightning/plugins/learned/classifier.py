"""A sequence-classification model as a reward, used as it is."""

from collections.abc import Sequence
from typing import Any, Literal

from grpo_lightning.policy import pretrained
from grpo_lightning.policy.chat import chat_text
from grpo_lightning.rewards.base import Reward, Run
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.types import Sample, Status, UsageError, at_least

# torch and transformers are imported where they are used: a worker that imports the package need not wait for them.

DType = Literal["float32", "bfloat16", "float16"]
Pooling = Literal["model", "last"]


class Classifier:
    """A classification model of transformers with its own tokenizer, in eval mode and without gradients.

    Args:
        path: Folder made by `save_pretrained`, or hub id.
        kind: Whether it classifies whole texts or each of their tokens.
        device: The device of the weights.
        dtype: Type of the weights.
        max_length: Longest input in tokens; None is the most that tokenizer and model allow.
        max_tokens: Tokens in one forward, padding included.
        pooling: The token at which a decoder's score of a sequence is read. `model`: the last one that is not
            `config.pad_token_id`, as in transformers. `last`: the last one of the input.
        trust_remote_code: Run Python code shipped with the model.
        owner: The class that has the argument `path`, for messages.

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
        owner: str = "Classifier",
    ) -> None:
        import torch
        from transformers import (
            AutoConfig,
            AutoModelForSequenceClassification,
            AutoModelForTokenClassification,
            AutoTokenizer,
        )

        model_class = AutoModelForSequenceClassification if kind == "sequence" else AutoModelForTokenClassification
        key, options = f"{owner}.path", {"trust_remote_code": trust_remote_code}
        self.tokenizer: Any = pretrained.load(AutoTokenizer, path, key, **options)
        config = pretrained.load(AutoConfig, path, key, **options)
        architecture = (config.architectures or [""])[0]
        if kind.capitalize() not in architecture.removesuffix("Classification"):
            raise UsageError(
                f"{key}={path}: its architecture is {architecture or 'unknown'}; give a model that classifies {kind}s"
            )
        self.model: Any = pretrained.load(model_class, path, key, dtype=getattr(torch, dtype), **options)
        self.model.eval().requires_grad_(False).to(device)
        positions = getattr(config, "max_position_embeddings", None) or 2**31
        self.max_length = max_length or min(positions, self.tokenizer.model_max_length)
        self.max_tokens = max_tokens
        self.pad_token_id = config.pad_token_id if pooling == "model" else None

    @property
    def num_labels(self) -> int:
        """The number of numbers it gives to each text or token."""
        return self.model.config.num_labels

    def logits(self, inputs: Sequence[list[int]]) -> list[Any]:
        """The float32 logits of each input, on the CPU: [num_labels] of a sequence, [its length, num_labels] of tokens.

        Inputs are packed by length, padded on the right and masked.
        """
        import torch

        from grpo_lightning.maths.ragged import token_budget

        found: list[Any] = [None] * len(inputs)
        for rows in token_budget([len(ids) for ids in inputs], self.max_tokens):
            longest = max(len(inputs[row]) for row in rows)
            pad = self._pad([inputs[row] for row in rows])
            ids = torch.tensor([inputs[row] + [pad] * (longest - len(inputs[row])) for row in rows])
            mask = torch.tensor([[1] * len(inputs[row]) + [0] * (longest - len(inputs[row])) for row in rows])
            device = self.model.device
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float().cpu()
            for own, row in zip(logits, rows, strict=True):
                found[row] = own if own.ndim == 1 else own[: len(inputs[row])]
        return found

    def _pad(self, inputs: Sequence[list[int]]) -> int:
        """The model's pad token; where it has none, a token that no input contains, which becomes its pad token."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        seen = set().union(*inputs)
        pad = next(token for token in range(self.model.config.vocab_size) if token not in seen)
        self.model.config.pad_token_id = pad
        return pad

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> tuple[list[list[int]], list[bool]]:
        """The token ids of each text, and whether its beginning was cut off because the text was too long."""
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
        at_least("max_length", max_length, 1, "SequenceClassifier")
        at_least("max_tokens", max_tokens, 1, "SequenceClassifier")
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
        """The logit. Status `ok`, or `cut` where the model did not read the beginning."""
        classifier = self._load()
        texts = [self._input(classifier, sample) for sample in samples]
        ids, cut = classifier.encode(texts, add_special_tokens=not self.chat)
        values = [float(logits[0]) for logits in classifier.logits(ids)]
        return RewardResult(values, [Status.CUT if is_cut else Status.OK for is_cut in cut])

    def close(self) -> None:
        """Releases the model."""
        self._classifier = None

    def _input(self, classifier: Classifier, sample: Sample) -> str:
        if not self.chat:
            return sample.prompt.text + sample.text
        return self._render(classifier, sample.prompt.question.text, sample.turn)

    def _render(self, classifier: Classifier, question: str, answer: str) -> str:
        return chat_text(classifier.tokenizer, question, answer, key=f"chat=true of {self.name}")

    def _load(self, device: Any = "cpu") -> Classifier:
        if self._classifier is None:
            classifier = Classifier(self.path, device=device, owner="SequenceClassifier", **self._options)
            if classifier.num_labels != 1:
                raise UsageError(
                    f"SequenceClassifier.path={self.path}: it has {classifier.num_labels} labels; expected 1"
                )
            if self.chat:
                self._render(classifier, "question", "answer")
            self._classifier = classifier
        return self._classifier
