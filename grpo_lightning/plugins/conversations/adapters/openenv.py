"""Environments of OpenEnv that run as servers (optional extra `openenv`)."""

import json
from typing import Any

from grpo_lightning.plugins.conversations.adapters.base import SEED, Seeds
from grpo_lightning.plugins.conversations.base import Turn
from grpo_lightning.types import Message, Question, require


class OpenEnv(Seeds):
    """An environment of OpenEnv, by the address of its server. Each conversation holds a session there.

    The server must allow as many sessions as there are conversations at once: `max_concurrent_envs` of OpenEnv. A group
    begins with the same seed, if the environment takes one. Environments whose actions are tools of MCP need a class
    of your own.

    Args:
        url: Address of the server, such as `http://localhost:8000`.
        action: The field of the environment's action that is what the policy wrote, such as `code` or `message`.
        observation: The field of the observation that the policy reads; empty shows all of it as JSON.
        reset: Arguments of the environment's `reset`, besides the seed.
        num_train: Seeds to train on.
        num_val: Seeds held out for validation, and as many others for test.

    Raises:
        UsageError: OpenEnv is not installed, or the address is none.
    """

    module, extra = "openenv.core.generic_client", "openenv"

    def __init__(
        self,
        url: str = "http://localhost:8000",
        action: str = "message",
        observation: str = "",
        reset: dict[str, Any] | None = None,
        num_train: int = 8000,
        num_val: int = 100,
    ) -> None:
        is_address = url.startswith(("http://", "https://", "ws://", "wss://"))
        require(is_address, f"url={url} of OpenEnv: give the address of a server, such as http://localhost:8000")
        super().__init__(url, num_train, num_val)
        self.url, self.action, self.observation, self.arguments = url, action, observation, reset or {}

    def reset(self, question: Question) -> list[Message]:
        """Opens a session. Returns what is seen first."""
        self._client = self.library.GenericEnvClient(base_url=self.url).sync()
        self._client.connect()
        seed = {SEED: question.metadata[SEED]} if SEED in question.metadata else {}
        return [{"role": "user", "content": self._text(self._client.reset(**seed, **self.arguments).observation)}]

    def step(self, message: Message) -> Turn:
        """Sends the turn as an action."""
        result = self._client.step({self.action: message["content"]})
        seen = [{"role": "user", "content": self._text(result.observation)}]
        return Turn(seen, float(result.reward or 0), bool(result.done))

    def close(self) -> None:
        """Ends the session."""
        self._client.close()

    def _text(self, observation: dict[str, Any]) -> str:
        if not self.observation:
            return json.dumps(observation, ensure_ascii=False)
        if self.observation not in observation:
            raise ValueError(f"the observation has no {self.observation}: give one of {', '.join(observation)}")
        return str(observation[self.observation])
