"""A validation of a name of its own, beside the main one."""

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
    """A validation of a name of its own: what is asked, how often each question is answered, and who judges.

    Its curves are `val/NAME/avg@k`, `val/NAME/greedy` and so on. Settings that are None are those of the run.

    Args:
        task: Where the questions come from.
        split: Which of the task's questions.
        judge: The reward that decides what is right. None is that of the task.
        samples: k of avg@k, pass@k and maj@k.
        sampling: Settings of `model.sampling` that it overrides.
        template: The prompt, with `{question}` where the question goes, in place of `data.template`.
        chat: Put the prompt into the tokenizer's chat template, or not, in place of `data.chat`.
        system: System turn of the chat template, in place of `data.system`.
        limit: Ask the first `limit` questions. None asks all.
        every: Ask after exploration steps whose number is a multiple of it, and before the first. The run must validate
            then: give a multiple of `trainer.check_val_every_n_epoch`.
    """

    task: Task
    split: Literal["val", "test"] = "test"
    grader: Reward | None = None
    samples: int = 8
    sampling: ValidationSampling = field(default_factory=ValidationSampling)
    template: str | None = None
    chat: bool | None = None
    system: str | None = None
    limit: int | None = None
    every: int = 1

    def connect(self, name: str, run: TaskData, graders: dict[str, Reward]) -> None:
        """Makes its data like that of the run, and its judge, or takes one of `graders`, which are by class."""
        key = f"data.validations.{name}"
        self.key, self.run = key, run
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
            fix = f"set {key}.grader: {type(self.task).__name__} names none"
            require(kind is not None, f"{key}: nothing decides what is right. So {fix}")
            if kind not in graders:
                graders[str(kind)] = grader_class(str(kind))()
            self.grader = graders[str(kind)]
        self.scorer = Scorer([self.grader])

    def evaluation(self, explorer: Explorer, sampling: Sampling) -> Evaluation:
        """Its metrics in a run that explores so."""
        self.scorer.max_failed = explorer.scorer.max_failed
        own = Explorer(explorer.engine, self.scorer, self.data.sampler)
        try:
            return Evaluation(own, self.sampling.over(sampling), self.samples)
        except UsageError as error:
            raise UsageError(f"{self.key}: {error}") from error

    def load(self, policy: Policy, sampling: Sampling) -> None:
        """Reads its questions, once."""
        try:
            stage = {"val": "validate", "test": "test"}[self.split]
            self.data.load(stage, policy, self.sampling.over(sampling), self.scorer)
        except UsageError as error:
            raise UsageError(f"{self.key}: {error}") from error
        self.data.questions[self.split] = self.data.questions[self.split][: self.limit]

    def loader(self, name: str) -> PromptLoader:
        """Its prompts in batches; none in a validation that does not ask it."""
        return PromptLoader(self.data, self.split, name, self.is_due)

    def is_due(self) -> bool:
        """Whether the validation that has begun asks it."""
        trainer = self.run.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return True
        return (trainer.current_epoch + 1) % self.every == 0


def connect(benchmarks: Mapping[str, Benchmark], run: TaskData) -> None:
    """Makes their data like that of the run. Those judged by the same class share a judge."""
    graders: dict[str, Reward] = {}
    for name, benchmark in benchmarks.items():
        benchmark.connect(name, run, graders)
