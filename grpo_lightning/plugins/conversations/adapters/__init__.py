"""Environments of other libraries, each behind an extra: questions are seeds."""

import importlib
import json
import random
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from grpo_lightning.plugins.conversations.base import Environment, Turn
from grpo_lightning.plugins.conversations.tools import found_at
from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.types import Message, Question, UsageError, at_least, require

SEED = "seed"  # the key of a question's metadata that holds its seed


class Seeds(Environment, Task):
    """An environment of another library that makes up what it asks, from a seed per question.

    Validation has the first `num_val` seeds, test (and predict) the next `num_val`, training the ones after them.

    Args:
        label: What stands before the seed in the question's text, which the policy does not see.
        num_train: Seeds to train on.
        num_val: Seeds held out for validation, and as many others for test.

    Raises:
        UsageError: The library is not installed.
    """

    judge = "EnvironmentReward"
    module: str  # the one that is imported
    extra: str  # the one that installs it

    def __init__(self, label: str, num_train: int, num_val: int) -> None:
        package = self.module.partition(".")[0]
        is_there = find_spec(package) is not None
        require(is_there, f"{package} is not installed: pip install grpo-lightning[{self.extra}]")
        at_least("num_train", num_train, 1, type(self).__name__)
        at_least("num_val", num_val, 1, type(self).__name__)
        self.label, self.num_train, self.num_val = label, num_train, num_val

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Imports the library, once for all processes that are copied from this one."""
        self.__dict__ |= state
        _ = self.library

    @property
    def library(self) -> Any:
        """The module."""
        return importlib.import_module(self.module)

    def questions(self, split: Split) -> Sequence[Question]:
        """The seeds of a split."""
        bounds = {"val": (0, self.num_val), "train": (2 * self.num_val, 2 * self.num_val + self.num_train)}
        seeds = range(*bounds.get(split, (self.num_val, 2 * self.num_val)))
        return [Question(f"{self.label}, seed {one}", "", f"{self.label}:{one}", {SEED: one}) for one in seeds]


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


class TextArena(Seeds):
    """A text game of TextArena (arXiv 2504.11442), against opponents that a function plays.

    A group plays the same deal; what chance does later differs. The outcome is the policy's reward in the game: 1, 0 or
    -1 for a win, a draw and a loss, where there are several players. A game that a limit ends is lost.

    Args:
        game: Name of the game, such as `KuhnPoker-v0`.
        num_players: Players. The policy is the first.
        opponent: Import path of a function that plays the others: what a player was told since its last move -> its
            move. By default one of the moves that the game offers in square brackets, drawn at random.
        options: Arguments of the game, such as `{max_rounds: 3}`.
        num_train: Deals to train on.
        num_val: Deals held out for validation, and as many others for test.

    Raises:
        UsageError: TextArena is not installed or has no such game, or the function cannot be imported.
    """

    module = extra = "textarena"

    def __init__(
        self,
        game: str = "KuhnPoker-v0",
        num_players: int = 2,
        opponent: str = "grpo_lightning.plugins.conversations.adapters.opponents.any_move",
        options: dict[str, Any] | None = None,
        num_train: int = 8000,
        num_val: int = 100,
    ) -> None:
        super().__init__(game, num_train, num_val)
        self.game, self.num_players, self.opponent, self.options = game, num_players, opponent, options or {}
        try:
            self._make()
            require(callable(found_at(opponent)), "opponent is no function")
        except (ImportError, AttributeError, OSError, TypeError, ValueError) as error:
            raise UsageError(f"TextArena with game={game}, options={options}, opponent={opponent}: {error}") from error

    def _make(self) -> Any:
        return self.library.make(f"{self.game}-raw", **self.options)  # Other variants repeat the history.

    def reset(self, question: Question) -> list[Message]:
        """The rules, and what happens before the policy's first move."""
        self._rewards: dict[int, float] = {}
        self._game, state = self._make(), random.getstate()
        self._game.reset(num_players=self.num_players, seed=question.metadata.get(SEED))
        random.setstate(state)
        return [{"role": "user", "content": self._until_the_policy(False)}]

    def step(self, message: Message) -> Turn:
        """Makes the policy's move, and those of the others."""
        told = self._until_the_policy(self._game.step(action=message["content"])[0])
        return Turn([{"role": "user", "content": told}], done=bool(self._rewards))

    def outcome(self) -> float:
        """The policy's reward in the game; if the game has not ended, the worst."""
        return float(self._rewards.get(0, -1 if self.num_players > 1 else 0))

    def _until_the_policy(self, done: bool) -> str:
        """The text that the policy reads until it moves again, or the game is over."""
        while not done:
            player, news = self._game.get_observation()
            lines = [text if sender < 0 else f"Player {sender}: {text}" for sender, text, _ in news if sender != player]
            told = "\n".join(lines).strip()
            if player == 0:
                return told
            done, _ = self._game.step(action=found_at(self.opponent)(told))
        self._rewards, info = self._game.close()
        return str(info[0].get("reason", ""))
