"""Named validations, beside the validation on the task's questions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning.pytorch.trainer.states import TrainerFn

from grpo_lightning.engines.sampling import Sampling, ValidationSampling
from grpo_lightning.grpo.explore import Explorer
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.tasks.task import Task
from grpo_lightning.training.evaluation import Evaluation, grader_class
from grpo_lightning.training.task_data import PromptLoader, TaskData
from grpo_lightning.types import UsageError, at_least, require


@dataclass(eq=False)
class Benchmark:
    """A validation with its own name, questions, sampling settings and grader.

    Its curves are `val/NAME/avg@k`, `val/NAME/greedy` and so on. A setting that is None is the run's.

    Args:
        task: The task with the questions.
        split: Which of the task's questions.
        grader: The reward that decides what is right. None takes the task's grader.
        samples: k of avg@k, pass@k and maj@k.
        sampling: Settings that differ from `model.sampling`.
        template: The prompt, with `{question}` where the question goes, in place of `data.template`.
        chat: Put the prompt into the tokenizer's chat template, or not, in place of `data.chat`.
        system: System turn of the chat template, in place of `data.system`.
        limit: Ask the first `limit` questions. None asks all.
        every: Ask after exploration steps whose number is a multiple of it, and before the first. The run must validate
            then: give a multiple of `trainer.check_val_every_n_epoch`.
    """

    task: Task
    """The task with the questions."""
    split: Literal["val", "test"] = "test"
    """Which of the task's questions."""
    grader: Reward | None = None
    """Decides what is right; after `connect` never None."""
    samples: int = 8
    """Completions per question."""
    sampling: ValidationSampling = field(default_factory=ValidationSampling)
    """Settings that differ from `model.sampling`."""
    template: str | None = None
    """The prompt; None takes `data.template`."""
    chat: bool | None = None
    """Whether the chat template is used; None takes `data.chat`."""
    system: str | None = None
    """System turn of the chat template; None takes `data.system`."""
    limit: int | None = None
    """Questions that are asked; None asks all."""
    every: int = 1
    """Exploration steps between two validations."""

    def connect(self, name: str, run: TaskData, graders: dict[str, Reward]) -> None:
        """Makes the benchmark's data, with the run's settings where it has none, and its grader.

        Args:
            name: Name of the benchmark.
            run: Data of the run.
            graders: Graders that benchmarks share, by the names of their classes; a missing grader is added.
        """
        key = f"data.validations.{name}"
        self.key = key
        self.run = run
        require(re.fullmatch(r"[\w-]+", name) is not None, f"{key}: give a name of letters, digits, _ and -")
        for setting in ("samples", "limit", "every"):
            at_least(f"{key}.{setting}", getattr(self, setting), 1)
        chat = run.chat if self.chat is None else self.chat
        try:
            self.data = type(run)(
                self.task,
                template=run.template if self.template is None else self.template,
                chat=chat,
                system=self.system if self.system is not None else run.system if chat else "",
                answer_prefix=run.answer_prefix,
                skip_long=run.skip_long,
                chat_template_kwargs=run.chat_template_kwargs if chat else None,
                val_batch_size=run.val_batch_size,
            )
        except UsageError as error:
            raise UsageError(str(error).replace("data.", f"{key}.")) from error
        if self.grader is None:
            kind = self.task.grader
            if kind is None:
                raise UsageError(
                    f"{key}: nothing decides what is right. So set {key}.grader: {type(self.task).__name__} names none"
                )
            if kind not in graders:
                graders[kind] = grader_class(kind)()
            self.grader = graders[kind]
        self.scorer = Scorer([self.grader])

    def evaluation(self, explorer: Explorer, sampling: Sampling) -> Evaluation:
        """Returns the evaluation on the benchmark's questions.

        Args:
            explorer: The run's explorer, whose engine samples here too.
            sampling: The run's sampling settings.
        """
        self.scorer.max_failed = explorer.scorer.max_failed
        benchmark_explorer = Explorer(explorer.engine, self.scorer, self.data.sampler)
        try:
            return Evaluation(benchmark_explorer, self.sampling.over(sampling), self.samples)
        except UsageError as error:
            raise UsageError(f"{self.key}: {error}") from error

    def load(self, policy: Policy, sampling: Sampling) -> None:
        """Reads the questions, once."""
        stage = "validate" if self.split == "val" else "test"
        self.data.text_engine = self.run.text_engine
        try:
            self.data.load(stage, policy, self.sampling.over(sampling), self.scorer)
        except UsageError as error:
            raise UsageError(f"{self.key}: {error}") from error
        self.data.questions[self.split] = self.data.questions[self.split][: self.limit]

    def loader(self, name: str) -> PromptLoader:
        """Returns the prompts in batches; no batch in a validation where the benchmark is not due."""
        return PromptLoader(self.data, self.split, name, self.is_due)

    def is_due(self) -> bool:
        """Returns True if the validation that has begun asks the benchmark's questions."""
        trainer = self.run.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return True
        return (trainer.current_epoch + 1) % self.every == 0


def connect(benchmarks: Mapping[str, Benchmark], run: TaskData) -> None:
    """Makes the data of benchmarks. Benchmarks whose tasks name the same class share a grader."""
    graders: dict[str, Reward] = {}
    for name, benchmark in benchmarks.items():
        benchmark.connect(name, run, graders)
