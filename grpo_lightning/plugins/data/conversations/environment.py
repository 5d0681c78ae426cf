"""The Environment family: an environment answers the policy, turn by turn."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_lightning.types import Message, Question


@dataclass(slots=True)
class Turn:
    """An environment's answer to a turn of the policy."""

    messages: list[Message] = field(default_factory=list)
    """New messages, each with `role` and `content`. The conversation ends where there are none."""
    reward: float = 0.0
    """Reward of the policy's turn."""
    done: bool = False
    """True if the conversation ends with this turn."""
    num_failed_calls: int = 0
    """Calls of tools in the policy's turn that failed."""

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError where messages or reward have another form."""
        if not isinstance(self.messages, list):
            raise TypeError(f"messages={self.messages!r}: give a list of messages")
        for message in self.messages:
            is_message = isinstance(message, dict)
            if not (is_message and all(isinstance(message.get(key), str) for key in ("role", "content"))):
                raise TypeError(f"the message {message!r}: give `role` and `content`, both text")
        self.reward = float(self.reward)
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward {self.reward}: give a finite number")


class Environment(ABC):
    """Holds a conversation with the policy: a game, a user, tools. Derive from it, with a `reset` and a `step`.

    Each completion gets its instance, in a separate process: a copy of the instance that the configuration makes. So
    `__init__` takes options, and `reset` sets up what one conversation needs. In the process `random` is seeded by the
    run's seed, the step, the prompt and the sample: a resumed run sees the same environment.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of tools that the policy may call, as `transformers.utils.get_json_schema` makes them."""

    def tools_for(self, question: Question) -> Sequence[Mapping[str, Any]]:
        """Returns the schemas of the tools that a conversation about `question` has: by default all."""
        return self.tools

    @abstractmethod
    def reset(self, question: Question) -> list[Message]:
        """Begins a conversation about `question`, and returns its first messages.

        Args:
            question: Its text stands in the prompt template.
        """

    @abstractmethod
    def step(self, message: Message) -> Turn:
        """Answers a turn of the policy.

        Args:
            message: Its `role` is `assistant`, its `content` what the policy wrote. With `tools`, `tool_calls` is the
                list of calls in it: each has `name` and `arguments`, or an `error` where it cannot be read.
        """

    def outcome(self) -> float | None:
        """Returns the reward of the whole conversation, at its end; None leaves it to the turns."""
        return None

    def close(self) -> None:
        """Releases what the instance holds. Its process ends afterwards."""


class Remote:
    """Serves an environment in its process, JSON in and JSON out; refuses what has another form."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def reset(self, question: dict[str, Any]) -> list[Message]:
        """Returns the first messages of a conversation."""
        return Turn(self.environment.reset(Question(**question))).messages

    def step(self, message: Message) -> dict[str, Any]:
        """Returns the fields of the `Turn` that answers a message."""
        turn = self.environment.step(message)
        if not isinstance(turn, Turn):
            raise TypeError(f"step returned {turn!r}: return a Turn(messages, reward, done)")
        return asdict(turn)

    def end(self) -> float | None:
        """Closes the environment, and returns its outcome."""
        outcome = self.environment.outcome()
        self.environment.close()
        return None if outcome is None else Turn(reward=outcome).reward
