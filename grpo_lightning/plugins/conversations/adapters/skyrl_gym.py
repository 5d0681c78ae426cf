"""Environments of SkyRL-Gym (optional extra `skyrl-gym`)."""

from types import SimpleNamespace
from typing import Any

from grpo_lightning.plugins.conversations.adapters.base import Adapter
from grpo_lightning.plugins.conversations.base import Turn
from grpo_lightning.types import Message, Question, require


class SkyRLGym(Adapter):
    """An environment of SkyRL-Gym, about the questions of any task: `gsm8k_multi_turn` asks again after a wrong answer.

    A question's gold answer is `reward_spec.ground_truth` there, its other columns are `extra_info`. Rewards are those
    of the turns: give `EnvironmentReward`.

    Args:
        name: Name of the environment, such as `gsm8k_multi_turn`.
        extras: Further arguments, such as `{max_turns: 3}`.
        config: Its configuration (`env_config`); attributes of an object there, keys here.

    Raises:
        UsageError: SkyRL-Gym is not installed, or has no such environment.
    """

    module, extra = "skyrl_gym", "skyrl-gym"

    def __init__(
        self, name: str = "gsm8k_multi_turn", extras: dict[str, Any] | None = None, config: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.name, self.extras, self.config = name, extras or {}, config or {}
        registry = self.library.registry
        there = f"there is no such environment; there are {', '.join(registry)}"
        require(name in registry, f"name={name} of SkyRLGym: {there}")

    def reset(self, question: Question) -> list[Message]:
        """The question, as the environment puts it."""
        given = {"reward_spec": {"ground_truth": question.answer}, "extra_info": question.metadata} | self.extras
        self._env = self.library.make(self.name, env_config=SimpleNamespace(**self.config), extras=given)
        messages, _ = self._env.init([{"role": "user", "content": question.text}])
        return [dict(message) for message in messages]

    def step(self, message: Message) -> Turn:
        """The environment's answer to the text of the turn."""
        answer = self._env.step(message["content"])
        return Turn([dict(one) for one in answer["observations"]], float(answer["reward"]), bool(answer["done"]))

    def close(self) -> None:
        """Closes it."""
        self._env.close()
