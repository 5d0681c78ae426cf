"""Environments to test with: a game, a single turn, tools as TRL has them, and some that misbehave."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from examples.calculator import Calculator
from grpo_lightning import Environment, Task, Turn
from grpo_lightning.types import Message, Question, Request


class Guess(Environment, Task):
    """Guess a digit: the answer is `h`igher or `l`ower, and every turn that comes closer is worth something.

    Args:
        fail: The questions that misbehave, and how: `{"3": "hang"}`.
        shout: Megabytes of an answer that is too long.
    """

    def __init__(self, fail: dict[str, str] | None = None, shout: int = 5) -> None:
        self.fail = fail or {}
        self.shout = shout

    def questions(self, split: str) -> list[Question]:
        return [Question("guess", answer=str(row % 10), source=f"guess:{row}") for row in range(24)]

    def reset(self, question: Question) -> list[Message]:
        self.target = int(question.answer)
        if self.fail.get(question.answer) == "reset":
            raise ValueError("no such game")
        return [{"role": "user", "content": question.text}]

    def step(self, message: Message) -> Turn:
        match self.fail.get(str(self.target)):
            case "raise":
                raise KeyError("no such thing")
            case "hang":
                while True:
                    pass
            case "shout":
                return Turn([{"role": "user", "content": "x" * self.shout * 2**20}])
            case "fork":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            case "die":
                os._exit(1)
            case "kill":
                kill_the_run()
            case "surrogate":
                return Turn([{"role": "user", "content": b"\xff".decode(errors="surrogateescape")}])
            case "role":
                return Turn([{"role": "judge", "content": "no template has this role"}])
            case "nonsense":
                return Turn([{"text": "higher"}])
            case "sleep":
                time.sleep(0.01)
        digits = [int(character) for character in message["content"] if character.isdigit()]
        if not digits:
            return Turn([{"role": "user", "content": "digit"}], reward=-0.1)
        away = abs(digits[-1] - self.target)
        hint = "h" if digits[-1] < self.target else "l"
        return Turn([{"role": "user", "content": hint}], reward=1 - away / 10, done=not away)


def kill_the_run() -> None:
    """Kills the process that trains, by SIGKILL, unless the file KILLED exists already."""
    if not Path(os.environ["KILLED"]).exists():
        Path(os.environ["KILLED"]).touch()
        parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGKILL)


class Once(Environment):
    """One turn about the question of the task, and no reward."""

    def reset(self, question: Question) -> list[Message]:
        return [{"role": "user", "content": question.text}]

    def step(self, message: Message) -> Turn:
        return Turn()


class CounterEnv:
    """As in TRL's documentation: a class of its own, which knows nothing of this package."""

    def __init__(self) -> None:
        self.counter = 0

    def reset(self, **kwargs: Any) -> str | None:
        self.counter = 0
        return f" Start at {self.counter}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        if step < 0:
            raise ValueError("only up")
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter)


class AsyncEnv(CounterEnv):
    """The same with methods that are awaited."""

    async def reset(self, question: str) -> None:
        self.counter = 0

    async def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.
        """
        self.counter += step
        return self.counter

    async def get_reward(self) -> float:
        return float(self.counter)


def untooled(self: Any, **row: Any) -> str:
    return str(sorted(row))


FACTORIES = {"4": CounterEnv, "5": lambda: AsyncEnv(), "6": Calculator, "7": type("NoTools", (), {"reset": untooled})}


class LongEnv(CounterEnv):
    """Adds a long text to the question."""

    def reset(self, **kwargs: Any) -> str:
        return "0" * 1200


REWRITES = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ (m.content if loop.last else m.content.split('</think>')[-1]) + eos_token }}"
    "{% else %}{{ m.content + ':' }}{% endif %}{% endfor %}"
)
"""A chat template that drops the thinking of every turn but the last, as Qwen3's does."""


def thinking(request: Request, text: str) -> str:
    """A script for `ScriptedEngine` that thinks in its first turn, and guesses two digits that depend on the sample."""
    first = "h" not in text and "l:" not in text
    return f"<think>{request.sample}</think>{request.sample}" if first else str(9 - request.sample)
