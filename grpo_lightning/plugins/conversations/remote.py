"""An environment as its process serves it: JSON in, JSON out."""

from typing import Any

from grpo_lightning.plugins.conversations.base import Environment, Turn
from grpo_lightning.types import Message, Question


class Remote:
    """Serves an environment, and refuses what it returns in another form."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def reset(self, question: dict[str, Any]) -> list[Message]:
        """The first messages."""
        return Turn(self.environment.reset(Question(**question))).messages

    def step(self, message: Message) -> dict[str, Any]:
        """The fields of a `Turn`."""
        turn = self.environment.step(message)
        if not isinstance(turn, Turn):
            raise TypeError(f"step returned {turn!r}: return a Turn(messages, reward, done)")
        return {name: getattr(turn, name) for name in turn.__slots__}

    def end(self) -> float | None:
        """The outcome. The environment is closed."""
        outcome = self.environment.outcome()
        self.environment.close()
        return None if outcome is None else Turn(reward=outcome).reward
