"""An environment of OpenEnv, as one of another library: `pip install openenv`. Questions are seeds."""

import json
from collections.abc import Sequence
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from grpo_lightning import Environment, Question, Task, Turn
from grpo_lightning.tasks.base import Split
from grpo_lightning.types import Message, at_least, require

SEED = "seed"  # the key of a question's metadata that holds its seed


class OpenEnv(Environment, Task):
    """An environment of OpenEnv, by the address of its server. Each conversation holds a session there.

    The server must allow as many sessions as there are conversations at once: `max_concurrent_envs` of OpenEnv. A group
    begins with the same seed, if the environment takes one. Validation has the first `num_val` seeds, test (and
    predict) the next `num_val`, training the ones after them. Environments whose actions are tools of MCP need a class
    of your own.

    Args:
        url: Address of the server, such as `http://localhost:8000`.
        action: The field of the environment's action that is what the policy wrote, such as `code` or `message`.
        observation: The field of the observation that the policy reads; empty shows all of it as JSON.
        reset: Arguments of the environment's `reset`, besides the seed.
        num_train: Seeds to train on.
        num_val: Seeds held out for validation, and as many others for test.

    Raises:
        UsageError: The address is none, or a number is below 1.
    """

    judge = "EnvironmentReward"

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
        at_least("num_train", num_train, 1, "OpenEnv")
        at_least("num_val", num_val, 1, "OpenEnv")
        self.url, self.action, self.observation, self.arguments = url, action, observation, reset or {}
        self.num_train, self.num_val = num_train, num_val

    def questions(self, split: Split) -> Sequence[Question]:
        """The seeds of a split."""
        bounds = {"val": (0, self.num_val), "train": (2 * self.num_val, 2 * self.num_val + self.num_train)}
        seeds = range(*bounds.get(split, (self.num_val, 2 * self.num_val)))
        return [Question(f"{self.url}, seed {one}", "", f"{self.url}:{one}", {SEED: one}) for one in seeds]

    def reset(self, question: Question) -> list[Message]:
        """Opens a session. Returns what is seen first."""
        self._client = GenericEnvClient(base_url=self.url).sync()
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
        require(
            self.observation in observation,
            f"the observation has no {self.observation}: give one of {', '.join(observation)}",
        )
        return str(observation[self.observation])
