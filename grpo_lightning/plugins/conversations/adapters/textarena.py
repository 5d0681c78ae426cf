"""Games of TextArena (optional extra `textarena`)."""

import random
from typing import Any

from grpo_lightning.plugins.conversations.adapters.base import SEED, Seeds
from grpo_lightning.plugins.conversations.base import Turn
from grpo_lightning.plugins.conversations.tools import found_at
from grpo_lightning.types import Message, Question, UsageError, require


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
