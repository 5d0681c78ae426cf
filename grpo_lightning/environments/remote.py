"""An environment as its process serves it: JSON in, JSON out."""

import math
from dataclasses import asdict
from typing import Any

from grpo_lightning.environments.base import Environment, Message, Turn
from grpo_lightning.types import Question


class Remote:
    """Serves an environment, and refuses what it returns in another form.

    Args:
        environment: The environment.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def reset(self, question: dict[str, Any]) -> list[Message]:
        """The first messages."""
        return checked(self.environment.reset(Question(**question)), "reset")

    def step(self, message: Message) -> dict[str, Any]:
        """The fields of a `Turn`."""
        turn = self.environment.step(message)
        if not isinstance(turn, Turn):
            raise TypeError(f"step returned {turn!r}: return a Turn(messages, reward, done)")
        checked(turn.messages, "step")
        return asdict(turn) | {"reward": number(turn.reward, "the reward of step")}

    def end(self) -> float | None:
        """The outcome. The environment is closed."""
        outcome = self.environment.outcome()
        self.environment.close()
        return None if outcome is None else number(outcome, "outcome")


def number(value: Any, name: str) -> float:
    """The value as a finite float."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{name} is {value}: give a finite number")
    return found


def checked(messages: Any, name: str) -> list[Message]:
    """The messages, each with a role and a text."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TypeError(f"{name} returned {messages!r}: give a list of messages")
    for message in messages:
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise TypeError(f"{name} returned the message {message!r}: give `role` and `content`, both text")
    return messages
