"""Prompts of a task, and what answers the policy."""

from typing import Any

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.data.benchmarks.benchmark import Benchmark, connect
from grpo_lightning.plugins.data.conversations.conversation_reward import EnvironmentReward
from grpo_lightning.plugins.data.conversations.conversations import Conversations
from grpo_lightning.plugins.data.conversations.environment import Environment
from grpo_lightning.plugins.data.conversations.instances import Limits
from grpo_lightning.plugins.data.conversations.tools import ToolEnvironment
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.tasks.orders import QuestionOrder
from grpo_lightning.tasks.task import Task
from grpo_lightning.training.task_data import QUESTION, TaskData
from grpo_lightning.types import Prompt, Question, UsageError, require


class PromptDataModule(TaskData):
    """Prompts from a task's questions, and an environment for completions of several turns.

    The arguments up to `order` are described at `TaskData`.

    Args:
        val_limit: Validate on the first `val_limit` validation questions; None takes all. Test and predict take all. 0,
            with `validations`, leaves them alone.
        environment: What answers the policy, so that a completion has several turns: an `Environment`, or the import
            path of a class whose methods are tools, such as `my_tools.Calculator`, or of a dict of them. By default it
            is the task, if that is an `Environment` too; else there is one turn.
        limits: Of a conversation with the environment.
        validations: Validations beside that on the task's own questions, by name.
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
        environment: Environment | str | None = None,
        limits: Limits | None = None,
        validations: dict[str, Benchmark] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        most = val_limit or None if validations else val_limit
        prompts = (task, template, template_file, chat, system, answer_prefix, skip_long)
        super().__init__(*prompts, most, val_batch_size, seed, order, chat_template_kwargs)
        self.val_limit, self.validations = val_limit, validations or {}
        if val_limit == 0:
            self.questions["val"] = []
        connect(self.validations, self)
        if isinstance(environment, str):
            environment = ToolEnvironment(environment)
        elif environment is None and isinstance(task, Environment):
            environment = task
        self.conversations: Conversations | None = None
        if environment is not None:
            several = "with an environment there are several turns; leave it empty"
            require(not answer_prefix, f"data.answer_prefix={answer_prefix!r}: {several}")
            self.sampler = self.conversations = Conversations(environment, limits, system, chat, chat_template_kwargs)

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
        """As `TaskData.load`; starts the environment."""
        if self.conversations is not None:
            self.conversations.load(policy.tokenizer)
            self.conversations.check_end(policy.stop_ids)
        elif named := [reward.name for reward in [*scorer.rewards, grader] if isinstance(reward, EnvironmentReward)]:
            raise UsageError(f"the reward {named[0]} is that of an environment: set data.environment, or leave it out")
        super().load(stage, policy, sampling, scorer, validates, val_sampling, grader)
        if validates and stage in ("fit", "validate"):
            for benchmark in self.validations.values():
                benchmark.load(policy, sampling)

    def render(self, question: Question) -> str:
        """The text that the model sees; with an environment, that of the question alone."""
        if self.conversations is None:
            return super().render(question)
        self.conversations.environment.tools_for(question)  # refuses one that names no class
        has_history = bool(question.history) and not isinstance(self.conversations.environment, ToolEnvironment)
        require(not has_history, f"{question.source}: it is a conversation, which data.environment would not see")
        return self.in_template(question)

    def prompt(self, question: Question, id: int) -> Prompt:
        """The question as a prompt; with an environment, the conversation begins with its own tokens."""
        if self.conversations is None:
            return super().prompt(question, id)
        text = self.render(question)
        return Prompt(id, text, self.encode(text), question)
