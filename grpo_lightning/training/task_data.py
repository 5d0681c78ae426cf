"""The data module: makes prompts of a task's questions, in a stream for training and in batches for validation."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lightning import ranks
from grpo_lightning.engines.sampler import Sampler, SingleTurn
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.grpo.step import Minibatch, Observer, Step
from grpo_lightning.policy.chat import Chat, prompt_ids
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.tasks.orders import QuestionOrder, Shuffled
from grpo_lightning.tasks.readers import naming
from grpo_lightning.tasks.task import Split, Task
from grpo_lightning.training import internals
from grpo_lightning.types import Message, Prompt, PromptImages, Question, UsageError, at_least

log = logging.getLogger(__name__)

QUESTION = "{question}"
"""The place of the question in a prompt template."""


@dataclass(slots=True)
class PromptBatch:
    """Prompts to validate or predict on."""

    prompts: list[Prompt]
    """The real prompts, then padding, so that every rank makes the same number of calls."""
    num_real: int
    """Number of real prompts."""
    validation: str = ""
    """Name of the validation; empty for the main one."""

    def to(self, device: torch.device | str) -> "PromptBatch":
        """Returns the batch itself: it holds no tensors."""
        return self


@dataclass
class PromptLoader:
    """Yields a split's questions of this rank in batches, equally many on every rank."""

    data: "TaskData"
    """The data module, which holds the questions and makes them prompts."""
    split: Split
    """The split of the questions."""
    validation: str = ""
    """Name of the validation; empty for the main one."""
    is_due: Callable[[], bool] = lambda: True
    """Returns False if this validation is to be skipped now."""

    def __len__(self) -> int:
        return -(-len(self.data.questions[self.split]) // (ranks.world_size() * self.data.val_batch_size))

    def __iter__(self) -> Iterator[PromptBatch]:
        questions = self.data.questions[self.split]
        world_size = ranks.world_size()
        batch_size = world_size * self.data.val_batch_size
        for start in range(0, len(questions) if self.is_due() else 0, batch_size):
            batch_rows = range(len(questions))[start : start + batch_size]
            rows = batch_rows[ranks.rank() :: world_size]
            # Rank 0 has the most questions; the other ranks are padded to as many.
            padding = [0] * (len(batch_rows[::world_size]) - len(rows))
            prompts = [self.data.prompt(questions[row], row) for row in (*rows, *padding)]
            yield PromptBatch(prompts, len(rows), self.validation)


class TaskData(L.LightningDataModule, Observer):
    """Makes prompts of a task's questions.

    Args:
        task: Provides the questions.
        template: The prompt, with `{question}` where the question goes.
        template_file: Text file with the prompt instead, in UTF-8, for example with solved questions before
            `{question}`. One line break at its end does not count.
        chat: Put the prompt into the tokenizer's chat template, as the user's turn.
        system: System turn of the chat template; empty leaves it out.
        answer_prefix: Beginning of every answer that is not sampled, such as `<think>`. It ends the prompt; in a chat
            the assistant's turn begins with it. Rewards see it before the sampled text.
        skip_long: Leave out questions whose prompt does not fit the model's context, instead of stopping.
        val_limit: Validate on the first `val_limit` validation questions; None takes all. Test and predict take all.
        val_batch_size: Questions validated at once.
        seed: Seed of the order of the training questions.
        order: Chooses the next training question; by default questions are shuffled in each pass.
        chat_template_kwargs: Further variables of the chat template, such as `{enable_thinking: false}`.
    """

    def __init__(
        self,
        task: Task,
        template: str = QUESTION,
        template_file: str | None = None,
        chat: bool = False,
        system: str = "",  # not None: YAML reads a leading # as a comment, and nothing as null
        answer_prefix: str = "",
        skip_long: bool = False,
        val_limit: int | None = None,
        val_batch_size: int = 64,
        seed: int = 0,
        order: QuestionOrder | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if template_file is not None:
            if template != QUESTION:
                raise UsageError(f"data.template_file={template_file}: leave out data.template={template!r}, or this")
            template = read_template(template_file)
        if QUESTION not in template:
            key = f"data.template={template!r}" if template_file is None else f"data.template_file={template_file}"
            raise UsageError(f"{key}: it must contain {QUESTION}, where the question goes")
        if system and not chat:
            raise UsageError("data.system is the system turn of a chat: set data.chat=true, or put it in data.template")
        if chat_template_kwargs and not chat:
            raise UsageError("data.chat_template_kwargs: they are for the chat template; set data.chat=true")
        if not chat and answer_prefix and template.rstrip().endswith(answer_prefix.strip()):
            raise UsageError(f"data.answer_prefix={answer_prefix!r}: data.template ends with it too; leave one out")
        at_least("data.val_batch_size", val_batch_size, 1)
        if val_limit is not None and val_limit < 1:
            raise UsageError(f"data.val_limit={val_limit}: give 1 or more; for none, trainer.limit_val_batches=0")
        self.task = task
        self.template = template
        self.chat = chat
        self.system = system
        self.answer_prefix = answer_prefix
        self.skip_long = skip_long
        self.chat_template_kwargs = chat_template_kwargs
        self.val_limit = val_limit
        self.val_batch_size = val_batch_size
        self.seed = seed
        self.order = order or Shuffled()
        self.sampler: Sampler = SingleTurn()
        """Makes samples of the engine's completions."""
        self.validations: Mapping[str, Any] = {}
        """Validations on other data, by name: each has `evaluation(explorer, sampling)` and `loader(name)`."""
        self.text_engine = ""
        """The class of the run's engine, if it reads no images."""
        self.train_loader: Iterable[Minibatch] | None = None
        """Yields the minibatches of `fit`; the loop sets it."""
        self._policy: Policy | None = None
        self._chat: Chat | None = None
        self.questions: dict[Split, Sequence[Question]] = {}
        """The questions read so far, by split."""

    def load(
        self,
        stage: str,
        policy: Policy,
        sampling: Sampling,
        scorer: Scorer,
        validates: bool = True,
        val_sampling: Sampling | None = None,
        grader: Reward | None = None,
    ) -> None:
        """Reads the questions that `stage` needs, once, checks that they fit the model, and shows them to the rewards.

        Args:
            stage: Lightning's stage: fit, validate, test or predict.
            policy: The policy; its weights need not be loaded.
            sampling: The distribution of training's completions.
            scorer: The rewards, which read all questions.
            validates: True if a fit validates.
            val_sampling: The distribution of the other stages; None: `sampling`.
            grader: Reads the questions of the other stages, unless it is a reward of `scorer`.
        """
        self._policy = policy
        splits: dict[str, list[Split]] = {
            "fit": ["train", "val"] if validates else ["train"],
            "validate": ["val"],
            "test": ["test"],
            "predict": ["predict"],
        }
        unread_splits = [split for split in splits[stage] if split not in self.questions]
        for split in unread_splits:
            split_sampling = sampling if split == "train" else val_sampling or sampling
            key = "sampling" if split_sampling.max_new_tokens == sampling.max_new_tokens else "validation.sampling"
            try:
                questions = self._fitting(split, split_sampling.max_new_tokens, f"{key}.max_new_tokens")
            except UsageError as error:
                if (stage, split) != ("fit", "val"):
                    raise
                raise UsageError(f"{error}; or set trainer.limit_val_batches=0 to fit without validation") from error
            self.questions[split] = questions[: self.val_limit] if split == "val" else questions
            if split == "train":
                self.order.setup(questions, self.seed)
        if stage != "predict":
            scorer.read_questions([question for split in unread_splits for question in self.questions[split]])
            graded = [question for split in unread_splits if split != "train" for question in self.questions[split]]
            if grader is not None and grader not in scorer.rewards and graded:
                grader.read_questions(graded)

    def _fitting(self, split: Split, new_tokens: int, key: str) -> Sequence[Question]:
        """Returns the questions of a split whose prompt leaves room for `new_tokens` more, which `key` sets."""
        questions = self.task.questions(split)
        context = self.policy.context_length
        tokenizer = self.policy.tokenizer
        max_prompt_tokens = math.inf if context is None else context - new_tokens
        # Some models name stop tokens that their tokenizer lacks.
        stop_tokens = tuple(filter(None, tokenizer.convert_ids_to_tokens([*self.policy.stop_ids])))
        may_lack_embeddings = len(tokenizer) > self.policy.text_config.vocab_size
        too_long: dict[int, int] = {}  # prompt tokens by row
        for row, question in enumerate(questions):
            text = self.render(question)
            # `prompt` refuses some ids. Tokenizing takes long, so only prompts that may have such ids are checked here.
            if row == 0 or may_lack_embeddings or text.rstrip().endswith(stop_tokens):
                self.prompt(question, row)
            # No tokenizer makes more tokens than there are bytes, but for a few special tokens and those of images.
            may_be_too_long = question.images or len(text.encode()) + 8 > max_prompt_tokens
            if may_be_too_long and (count := self.num_tokens(question, text)) > max_prompt_tokens:
                too_long[row] = count
        if not too_long:
            return questions

        if not self.skip_long:
            source, *more_sources = [questions[row].source for row in too_long]
            also = ""
            if more_sources:
                also = f" So do {len(more_sources)} more of {len(questions)}: {', '.join(more_sources[:4])}."
            reason = " (its longrope would change there)" if context == self.policy.longrope_length else ""
            raise UsageError(
                f"{source}: the prompt has {next(iter(too_long.values()))} tokens, and with {key}={new_tokens} it "
                f"exceeds the model's context of {context}{reason}.{also} Lower max_new_tokens, shorten the rows, or "
                "set data.skip_long=true to leave them out"
            )
        if len(too_long) == len(questions):
            raise UsageError(f"no {split} question fits the model's context of {context} tokens; lower {key}")
        log.warning(
            f"{len(too_long)} of {len(questions)} {split} questions do not fit the model's context and are left out"
        )
        return [question for row, question in enumerate(questions) if row not in too_long]

    def render(self, question: Question) -> str:
        """Returns the text that the model reads."""
        turns = self.turns(question)
        history = question.history
        if not self.chat:
            if history:
                raise UsageError(f"{question.source}: it is a conversation; set data.chat=true, which writes its turns")
            return str(turns[-1]["content"]) + self.answer_prefix
        tokenizer = self.policy.tokenizer
        if self._chat is None or self._chat.tokenizer is not tokenizer:
            self._chat = Chat(
                tokenizer,
                self.system,
                self.chat_template_kwargs,
                key="data.chat=true",
                advice="set data.chat=false and write data.template",
            )
        with naming(question.source):
            if self.system and any(turn["role"] == "system" for turn in history):
                raise UsageError("it has a system turn of its own; leave data.system empty")
            return self._chat.text(turns, self.answer_prefix)

    def turns(self, question: Question) -> list[Message]:
        """Returns the turns of a prompt; the last is the question in the prompt template."""
        return [*question.history, Message(role="user", content=self.in_template(question))]

    def in_template(self, question: Question) -> str:
        """Returns the question in the prompt template."""
        text = self.template.replace(QUESTION, question.text)
        try:
            (text + self.system + self.answer_prefix).encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{question.source}: {error.object[error.start]!r} is half a character: fix row or template"
            ) from error
        return text

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a rendered text; a chat template writes its special tokens itself."""
        tokenizer = self.policy.tokenizer
        return tokenizer.encode(text, add_special_tokens=False) if self.chat else prompt_ids(tokenizer, text)

    def inputs(self, question: Question, text: str) -> tuple[list[int], PromptImages | None]:
        """Returns the token ids of a rendered question, and its images, of which there are none here."""
        if question.images:
            raise UsageError(f"{question.source}: it has images; PromptDataModule reads them")
        return self.encode(text), None

    def num_tokens(self, question: Question, text: str) -> int:
        """Returns the number of tokens of a rendered question."""
        return len(self.inputs(question, text)[0])

    def prompt(self, question: Question, id: int) -> Prompt:
        """Makes a question a prompt; `id` keys its random numbers."""
        text = self.render(question)
        token_ids, images = self.inputs(question, text)
        if not token_ids:
            raise UsageError(f"{question.source}: the prompt {text!r} has no tokens")
        policy = self.policy
        last_id = token_ids[-1]
        if last_id in policy.stop_ids:
            raise UsageError(
                f"{question.source}: the prompt ends with {policy.tokenizer.decode([last_id])!r}, which ends an answer "
                "before it begins. Change the row, data.template, or the chat template in the model's folder"
            )
        largest_id = max(token_ids)
        vocab_size = policy.text_config.vocab_size
        if largest_id >= vocab_size:
            raise UsageError(
                f"{question.source}: the prompt has the token {policy.tokenizer.decode([largest_id])!r} with id "
                f"{largest_id}, and the embedding of {policy.path} has {vocab_size} rows: its tokenizer is that of "
                "another model. Take the one it was saved with, or model.resize_token_embeddings(len(tokenizer)), "
                "and save both"
            )
        return Prompt(id, text, token_ids, question, self.answer_prefix, images)

    def ask(self, ids: range) -> list[Prompt]:
        """Returns this rank's prompts of the next training questions, which get the prompt ids `ids`.

        Ranks take them in turn, so that minibatches are the same for any number of ranks.
        """
        id_and_row = [*zip(ids, self.order.next(ids), strict=True)]
        rank_questions = id_and_row[ranks.rank() :: ranks.world_size()]
        return [self.prompt(self.questions["train"][row], id) for id, row in rank_questions]

    def prepared(self, step: Step) -> None:
        """Passes the step's rewards of all ranks to an order that learns from them."""
        if type(self.order).observe is QuestionOrder.observe:
            return
        exploration = step.exploration
        rewards_by_id: dict[int, list[float]] = {}
        for sample, value in zip(exploration.samples, exploration.scores.main.value, strict=True):
            rewards_by_id.setdefault(sample.prompt.id, []).append(value)
        items = [item for rank_rewards in ranks.gather(rewards_by_id) for item in rank_rewards.items()]
        step.metrics |= self.order.observe(dict(sorted(items)))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the order; empty if it keeps none."""
        return self.order.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the order in a fit; Lightning calls this for `validate` too."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self.order.load_state_dict(state_dict)

    @property
    def policy(self) -> Policy:
        """The policy whose tokenizer and context the prompts are made for."""
        if self._policy is None:
            raise UsageError("TaskData has no policy yet: it goes with a GRPOModule, or call `load`")
        return self._policy

    def train_dataloader(self) -> Iterable[Minibatch]:
        """Returns the loader of the loop, which yields the minibatches of its exploration steps."""
        if self.train_loader is None:
            raise UsageError("fit needs the GRPOLoop callback: Trainer(callbacks=[GRPOLoop(...)])")
        return self.train_loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Makes Lightning and all callbacks log at the exploration step."""
        if isinstance(batch, Minibatch) and self.trainer is not None:
            internals.log_at_step(self.trainer)
        return batch

    def val_dataloader(self, split: Split = "val") -> list[PromptLoader]:
        """Returns the loaders of all validations, or of another split."""
        if split != "val":
            return [PromptLoader(self, split)]
        main = [PromptLoader(self, split)] if self.questions["val"] else []
        return [*main, *(validation.loader(name) for name, validation in self.validations.items())]

    test_dataloader = partialmethod(val_dataloader, "test")
    predict_dataloader = partialmethod(val_dataloader, "predict")


def read_template(path: str) -> str:
    """Reads a template's file, without the line break that editors write at its end."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = (
            f"it is not text in UTF-8 ({error.reason}). Save it as that"
            if isinstance(error, UnicodeDecodeError)
            else f"it cannot be read ({error.strerror}; looked in {Path.cwd()}). Give a text file with {QUESTION} in it"
        )
        raise UsageError(f"data.template_file={path}: {reason}") from error
