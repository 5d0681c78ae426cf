"""The Environment family: what answers the policy, turn by turn."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_lightning.types import Message, Question


@dataclass(slots=True)
class Turn:
    """An environment's answer to a turn of the policy."""

    # New messages, each with `role` and `content`. If there are none, or the conversation is done, it ends.
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False  # True if the conversation ends with this turn
    num_failed_calls: int = 0  # calls of tools in this turn that failed

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError where messages or reward have another form."""
        if not isinstance(self.messages, list):
            raise TypeError(f"messages={self.messages!r}: give a list of messages")
        for one in self.messages:
            if not (isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))):
                raise TypeError(f"the message {one!r}: give `role` and `content`, both text")
        self.reward = float(self.reward)
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward {self.reward}: give a finite number")


class Environment(ABC):
    """Holds a conversation with the policy: a game, a user, tools. Each completion gets an instance of its own.

    Instances live in processes of their own, which begin as copies of one that `__init__` has made. So `__init__` takes
    options, and `reset` sets up what one conversation needs. There `random` is seeded with the seed of the run, the
    step, the prompt and the sample: a resumed run sees the same environment.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of tools that the policy may call, as `transformers.utils.get_json_schema` makes them."""

    def tools_for(self, question: Question) -> Sequence[Mapping[str, Any]]:
        """Those of the tools that a conversation about `question` has: by default all."""
        return self.tools

    @abstractmethod
    def reset(self, question: Question) -> list[Message]:
        """Begins a conversation about `question`, whose text is in the prompt template. Returns its first messages."""

    @abstractmethod
    def step(self, message: Message) -> Turn:
        """Answers a turn of the policy.

        Args:
            message: Its `role` is `assistant`, its `content` what the policy wrote. With `tools`, `tool_calls` is the
                list of calls in it: each has `name` and `arguments`, or an `error` for one that cannot be read.
        """

    def outcome(self) -> float | None:
        """The reward of the whole conversation, asked once at its end; None leaves it to the turns."""
        return None

    def close(self) -> None:
        """Releases what the instance holds. Its process ends afterwards."""


class Remote:
    """An environment as its process serves it, JSON in and JSON out; what it returns in another form is refused."""

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
        return asdict(turn)

    def end(self) -> float | None:
        """The outcome. The environment is closed."""
        outcome = self.environment.outcome()
        self.environment.close()
        return None if outcome is None else Turn(reward=outcome).reward
