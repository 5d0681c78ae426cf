"""Prompts of a task, and the environment that answers the policy."""

from typing import Any

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.data.benchmarks.benchmark import Benchmark, connect
from grpo_lightning.plugins.data.conversations.conversation_reward import EnvironmentReward
from grpo_lightning.plugins.data.conversations.conversations import Conversations
from grpo_lightning.plugins.data.conversations.environment import Environment
from grpo_lightning.plugins.data.conversations.instances import Limits
from grpo_lightning.plugins.data.conversations.tools import ToolEnvironment
from grpo_lightning.plugins.data.images.image_prompts import ImagePrompts
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.tasks.orders import QuestionOrder
from grpo_lightning.tasks.task import Task
from grpo_lightning.training.task_data import QUESTION, TaskData
from grpo_lightning.types import Message, Prompt, PromptImages, Question, UsageError


class PromptDataModule(TaskData):
    """Prompts from a task's questions, and an environment for completions of several turns.

    The arguments up to `order` are described at `TaskData`.

    Args:
        val_limit: Validate on the first `val_limit` validation questions; None takes all. Test and predict take all. 0,
            with `validations`, takes none.
        environment: Answers the policy, so that a completion has several turns: an `Environment`, or the import path of
            a class whose methods are tools, such as `my_tools.Calculator`, or of a dict of such classes. By default the
            task, if it is an `Environment` too; else there is a single turn.
        limits: Limits of a conversation with the environment.
        validations: Validations beside the validation on the task's questions, by name.
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
        super().__init__(
            task,
            template,
            template_file,
            chat,
            system,
            answer_prefix,
            skip_long,
            # With further validations, 0 is allowed.
            val_limit or None if validations else val_limit,
            val_batch_size,
            seed,
            order,
            chat_template_kwargs,
        )
        self.val_limit = val_limit
        self.validations = validations or {}
        if val_limit == 0:
            self.questions["val"] = []
        connect(self.validations, self)
        if isinstance(environment, str):
            environment = ToolEnvironment(environment)
        elif environment is None and isinstance(task, Environment):
            environment = task
        self.image_prompts: ImagePrompts | None = None
        """Writes images into prompts; None until a question has an image."""
        self.conversations: Conversations | None = None
        if environment is not None:
            if answer_prefix:
                raise UsageError(
                    f"data.answer_prefix={answer_prefix!r}: with an environment there are several turns; leave it empty"
                )
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
        else:
            for reward in [*scorer.rewards, grader]:
                if isinstance(reward, EnvironmentReward):
                    raise UsageError(
                        f"the reward {reward.name} is that of an environment: set data.environment, or leave it out"
                    )
        super().load(stage, policy, sampling, scorer, validates, val_sampling, grader)
        if validates and stage in ("fit", "validate"):
            for benchmark in self.validations.values():
                benchmark.load(policy, sampling)

    def render(self, question: Question) -> str:
        """Returns the text that the model sees; with an environment, the text of the question alone."""
        if self.conversations is None:
            return super().render(question)
        if question.images:
            raise UsageError(
                f"{question.source}: it has images, and a conversation with an environment is text; leave out "
                "data.environment, or the images"
            )
        environment = self.conversations.environment
        environment.tools_for(question)  # refuses a question that names no class
        if question.history and not isinstance(environment, ToolEnvironment):
            raise UsageError(f"{question.source}: it is a conversation, which data.environment would not see")
        return self.in_template(question)

    def prompt(self, question: Question, id: int) -> Prompt:
        """Returns the question as a prompt. With an environment, the conversation writes the tokens of its prompt."""
        if self.conversations is None:
            return super().prompt(question, id)
        text = self.render(question)
        return Prompt(id, text, self.encode(text), question)

    def turns(self, question: Question) -> list[Message]:
        """Returns the turns of a prompt, with the question's images in their places."""
        turns = super().turns(question)
        if not question.images:
            return turns
        if self.text_engine:
            raise UsageError(
                f"model.engine={self.text_engine}: {question.source} has images, and this engine reads text alone; use "
                "NativeEngine or PlainEngine"
            )
        if self.image_prompts is None or self.image_prompts.encoder.tokenizer is not self.policy.tokenizer:
            self.image_prompts = ImagePrompts(self.policy, self.chat)
        return self.image_prompts.turns(question, turns)

    def inputs(self, question: Question, text: str) -> tuple[list[int], PromptImages | None]:
        """Returns the token ids of a rendered question, and what the processor of the policy made of its images."""
        if self.image_prompts is None or not question.images:
            return super().inputs(question, text)
        return self.image_prompts.inputs(question, text)

    def num_tokens(self, question: Question, text: str) -> int:
        """Returns the number of tokens of a rendered question, with those of its images."""
        if self.image_prompts is None or not question.images:
            return super().num_tokens(question, text)
        return self.image_prompts.num_tokens(question, text)
