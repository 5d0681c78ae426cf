"""The data module: the questions of a task as prompts, in a shuffled stream for training, in batches for validation."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.conversations.base import Environment
from grpo_lightning.plugins.conversations.reward import EnvironmentReward
from grpo_lightning.plugins.conversations.running import Conversations, Limits
from grpo_lightning.plugins.conversations.tools import ToolEnvironment
from grpo_lightning.policy.chat import chat_text
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.training.step import Minibatch
from grpo_lightning.types import Prompt, Question, UsageError, at_least

log = logging.getLogger(__name__)

QUESTION = "{question}"
"""What stands in a template for the question."""


@dataclass(slots=True)
class PromptBatch:
    """Prompts to validate or predict on."""

    prompts: list[Prompt]
    num_real: int
    """Number of real prompts. The others are padding, so that every rank makes the same number of calls."""

    def to(self, device: torch.device | str) -> "PromptBatch":
        """Itself: it holds no tensors."""
        return self


class PromptDataModule(L.LightningDataModule):
    """Prompts from a task's questions.

    Args:
        task: Where the questions come from.
        template: The prompt, with `{question}` where the question goes.
        template_file: Text file with the prompt instead, in UTF-8, for example with solved questions before
            `{question}`. One line break at its end does not count.
        chat: Put the prompt into the tokenizer's chat template, as the user's turn.
        system: System turn of the chat template; empty leaves it out.
        answer_prefix: Beginning of every answer, which is given and not drawn, such as `<think>`. It ends the prompt;
            in a chat the assistant's turn begins with it. Rewards see it before what the policy wrote.
        skip_long: Leave out questions whose prompt does not fit the model's context, instead of stopping.
        val_limit: Validate on the first `val_limit` validation questions; None takes all. Test and predict take all.
        val_batch_size: Questions validated at once.
        seed: Seed of the order of the training questions.
        environment: What answers the policy, so that a completion has several turns: an `Environment`, or the import
            path of a class whose methods are tools, such as `my_tools.Calculator`. By default it is the task, if that
            is an `Environment` too; else there is one turn.
        limits: Of a conversation with the environment.
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
        environment: Environment | str | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        if template_file is not None:
            if template != QUESTION:
                raise UsageError(
                    f"data.template_file={template_file}: leave out data.template={template!r}, or the file"
                )
            template = read_template(template_file)
        if QUESTION not in template:
            key = f"data.template={template!r}" if template_file is None else f"data.template_file={template_file}"
            raise UsageError(f"{key}: it must contain {QUESTION}, where the question goes")
        if system and not chat:
            raise UsageError(
                "data.system is the system turn of a chat: set data.chat=true, or put it into data.template"
            )
        at_least("data.val_batch_size", val_batch_size, 1)
        if val_limit is not None and val_limit < 1:
            raise UsageError(
                f"data.val_limit={val_limit}: give 1 or more; to validate nothing, trainer.limit_val_batches=0"
            )
        self.task = task
        self.template = template
        self.chat = chat
        self.system = system
        self.answer_prefix = answer_prefix
        self.skip_long = skip_long
        self.val_limit = val_limit
        self.val_batch_size = val_batch_size
        self.seed = seed
        if isinstance(environment, str):
            environment = ToolEnvironment(environment)
        elif environment is None and isinstance(task, Environment):
            environment = task
        if environment is not None and answer_prefix:
            raise UsageError(
                f"data.answer_prefix={answer_prefix!r}: with an environment there are several turns; leave it empty"
            )
        self.conversations = None if environment is None else Conversations(environment, limits, system, chat)
        """What holds the conversations with the environment; None where there is none."""
        self.train_loader: Iterable[Minibatch] | None = None
        """What `fit` trains on; the loop sets it."""
        self._policy: Policy | None = None
        self.questions: dict[Split, Sequence[Question]] = {}
        self._order: tuple[int, list[int]] = (-1, [])

    def load(
        self,
        stage: str,
        policy: Policy,
        sampling: Sampling,
        scorer: Scorer,
        validates: bool = True,
        val_sampling: Sampling | None = None,
        judge: Reward | None = None,
    ) -> None:
        """Reads the questions that `stage` needs, checks that they fit the model, and shows them to the rewards.

        The second call reads nothing again.

        Args:
            stage: `fit`, `validate`, `test` or `predict`.
            policy: For its tokenizer and context length; its weights may be unread.
            sampling: For the room that a completion needs in training.
            scorer: Its rewards read the questions, except for `predict`.
            validates: Whether `fit` validates, and so needs validation questions.
            val_sampling: For the room that it needs elsewhere; None is as in training.
            judge: It reads those of validation and test, if it is no reward of `scorer`.

        Raises:
            UsageError: A question does not fit, or a split lacks questions.
        """
        self._policy = policy
        if self.conversations is not None:
            self.conversations.load(policy.tokenizer)
        elif named := [reward.name for reward in [*scorer.rewards, judge] if isinstance(reward, EnvironmentReward)]:
            raise UsageError(f"the reward {named[0]} is that of an environment: set data.environment, or leave it out")
        splits: dict[str, list[Split]] = {"validate": ["val"], "test": ["test"], "predict": ["predict"]}
        splits["fit"] = ["train", "val"] if validates else ["train"]
        missing = [split for split in splits[stage] if split not in self.questions]
        for split in missing:
            drawn = sampling if split == "train" else val_sampling or sampling
            key = "sampling" if drawn.max_new_tokens == sampling.max_new_tokens else "val_sampling"
            try:
                questions = self._that_fit(
                    self.task.questions(split), split, drawn.max_new_tokens, f"{key}.max_new_tokens"
                )
            except UsageError as error:
                if (stage, split) != ("fit", "val"):
                    raise
                raise UsageError(f"{error}; or set trainer.limit_val_batches=0 to fit without validation") from error
            self.questions[split] = questions[: self.val_limit] if split == "val" else questions
        if stage != "predict":
            scorer.read_questions([question for split in missing for question in self.questions[split]])
            judged = [question for split in missing if split != "train" for question in self.questions[split]]
            if judge is not None and judge not in scorer.rewards and judged:
                judge.read_questions(judged)

    def _that_fit(self, questions: Sequence[Question], split: Split, new_tokens: int, key: str) -> Sequence[Question]:
        """The questions whose prompt leaves room for `new_tokens` more, which `key` sets."""
        for question in questions[:1]:
            self.render(question)  # refuses a chat template that cannot be used
        context = self.policy.context_length
        if context is None:
            return questions
        too_long: dict[int, int] = {}
        """Tokens of the prompt, by row."""
        for row, question in enumerate(questions):
            text = self.render(question)
            # No tokenizer makes more tokens than bytes, bar a few special ones: most rows need no tokenizing here.
            if (
                len(text.encode()) + 8 > context - new_tokens
                and (tokens := len(self.encode(text))) > context - new_tokens
            ):
                too_long[row] = tokens
        if not too_long:
            return questions
        if not self.skip_long:
            first, *more = [questions[row].source for row in too_long]
            also = f" So do {len(more)} more of {len(questions)}: {', '.join(more[:4])}." if more else ""
            raise UsageError(
                f"{first}: the prompt has {next(iter(too_long.values()))} tokens, and with {key}={new_tokens} it "
                f"exceeds the model's context of {context}.{also} Lower max_new_tokens, shorten the rows, or set "
                "data.skip_long=true to leave them out"
            )
        log.warning(
            "%d of %d %s questions do not fit the model's context and are left out",
            len(too_long),
            len(questions),
            split,
        )
        kept = [question for row, question in enumerate(questions) if row not in too_long]
        if not kept:
            raise UsageError(f"no {split} question fits the model's context of {context} tokens; lower {key}")
        return kept

    def render(self, question: Question) -> str:
        """The text that the model sees; with an environment, that of the question alone."""
        text = self.template.replace(QUESTION, question.text)
        try:
            (text + self.system + self.answer_prefix).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise UsageError(
                f"{question.source}: {half!r} of the prompt is half a character: fix row or template"
            ) from error
        if not self.chat or self.conversations is not None:
            return text + self.answer_prefix
        return chat_text(
            self.policy.tokenizer,
            text,
            system=self.system,
            answer_prefix=self.answer_prefix,
            key="data.chat=true",
            fix="set data.chat=false and write data.template",
        )

    def encode(self, text: str) -> list[int]:
        """The token ids of a rendered text; a chat template writes its special tokens itself."""
        return self.policy.tokenizer.encode(text, add_special_tokens=not self.chat)

    def prompt(self, question: Question, id: int) -> Prompt:
        """The question as a prompt; `id` keys its random numbers."""
        text = self.render(question)
        token_ids = self.encode(text)
        if not token_ids and self.conversations is None:
            raise UsageError(f"{question.source}: the prompt {text!r} has no tokens")
        return Prompt(id, text, token_ids, question, self.answer_prefix)

    def question(self, index: int) -> Question:
        """The training question at `index`, from 0, of an endless stream; every pass over the data has its own order.

        The index serves as prompt id, so a question that comes again gets new completions.
        """
        questions = self.questions["train"]
        cycle, position = divmod(index, len(questions))
        if self._order[0] != cycle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + cycle)
            self._order = (cycle, torch.randperm(len(questions), generator=generator).tolist())
        return questions[self._order[1][position]]

    @property
    def policy(self) -> Policy:
        """The policy that prompts are made for."""
        if self._policy is None:
            raise UsageError("PromptDataModule has no policy yet: it goes with a GRPOModule, or call `load`")
        return self._policy

    def train_dataloader(self) -> Iterable[Minibatch]:
        """The minibatches of the loop: the rollouts of its exploration steps."""
        if self.train_loader is None:
            raise UsageError("fit needs the GRPOLoop callback: Trainer(callbacks=[GRPOLoop(...)])")
        return self.train_loader

    def val_dataloader(self) -> "PromptLoader":
        """The validation prompts, in batches."""
        return PromptLoader(self, "val")

    def test_dataloader(self) -> "PromptLoader":
        """The test prompts, in batches."""
        return PromptLoader(self, "test")

    def predict_dataloader(self) -> "PromptLoader":
        """The prediction prompts, in batches."""
        return PromptLoader(self, "predict")


class PromptLoader:
    """This rank's questions of a split, in batches; every rank gets as many batches.

    Args:
        data: The questions.
        split: Which of them.
    """

    def __init__(self, data: PromptDataModule, split: Split) -> None:
        self.data = data
        self.split = split

    def _own_rows(self) -> tuple[list[int], int]:
        """The rows of this rank, and how many of them are real: the last ones may repeat row 0 to fill up."""
        assert self.data.trainer is not None
        rank, world_size = self.data.trainer.global_rank, self.data.trainer.world_size
        total = len(self.data.questions[self.split])
        rows = list(range(rank, total, world_size))
        size = -(-total // world_size)
        return rows + [0] * (size - len(rows)), len(rows)

    def __len__(self) -> int:
        return -(-len(self._own_rows()[0]) // self.data.val_batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        rows, real = self._own_rows()
        questions = self.data.questions[self.split]
        for first in range(0, len(rows), self.data.val_batch_size):
            chosen = rows[first : first + self.data.val_batch_size]
            prompts = [self.data.prompt(questions[row], id=row) for row in chosen]
            yield PromptBatch(prompts, min(len(chosen), max(0, real - first)))


def read_template(path: str) -> str:
    """The text of a template's file, without the line break that editors write at its end.

    Raises:
        UsageError: There is no such file, or it is not text in UTF-8.
    """
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise UsageError(
            f"data.template_file={path}: it cannot be read ({error.strerror}; looked in {Path.cwd()}). Give a text "
            f"file with {QUESTION} in it"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"data.template_file={path}: it is not text in UTF-8 ({error.reason}). Save it as that"
        ) from error
