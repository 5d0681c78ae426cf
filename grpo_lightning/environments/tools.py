"""A plain class as an environment, as TRL's `environment_factory` has it: its public methods are tools."""

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

from grpo_lightning.environments.base import Environment, Message, Turn
from grpo_lightning.types import Question, UsageError

OWN = ("reset", "get_reward")
"""Methods that are no tools."""


class ToolEnvironment(Environment):
    """Lets the policy call the methods of a class of your own, until it writes a turn without a call.

    The class is as TRL has it for `environment_factory`, and runs unchanged. `reset(**row)` is given the question's
    columns, and may return text to add to it. Every other public method is a tool; type hints and docstring describe
    it. `get_reward()`, if there is one, returns the reward of the conversation: see `EnvironmentReward`. Methods may be
    `async`. A tool that raises costs nothing: the policy reads the error.

    Args:
        tools: Import path of the class: `my_tools.Calculator` or `path/to/my_tools.py:Calculator`.
        arguments: Arguments of the class.

    Raises:
        UsageError: There is no such class, it has no `reset`, or a tool lacks type hints or a docstring.
    """

    def __init__(self, tools: str, arguments: dict[str, Any] | None = None) -> None:
        from transformers.utils import get_json_schema  # a worker that imports the package need not wait for it

        self.path = tools
        self.arguments = arguments or {}
        methods = methods_of(self._class())
        if not callable(getattr(self._class(), "reset", None)):
            raise UsageError(f"environment={tools}: the class has no method `reset`, which begins a conversation")
        try:
            self.tools = [get_json_schema(MethodType(method, self)) for method in methods.values()]
        except Exception as error:  # of transformers, of several kinds
            raise UsageError(
                f"environment={tools}: every tool needs type hints and a docstring with `Args:` ({error})"
            ) from error
        self._names = frozenset(methods)
        self._instance: Any = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Imports the class, once for all processes that are copied from this one."""
        self.__dict__ |= state
        self._class()

    def _class(self) -> type:
        try:
            found = load(self.path)
        except (ImportError, AttributeError, OSError) as error:
            raise UsageError(
                f"environment={self.path}: it cannot be imported ({error}). Give the import path of a class, such as "
                "my_tools.Calculator or path/to/my_tools.py:Calculator"
            ) from error
        if not isinstance(found, type):
            raise UsageError(f"environment={self.path}: this is a {type(found).__name__}, not a class")
        return found

    def reset(self, question: Question) -> list[Message]:
        """The question, and what the class adds to it."""
        self._instance = self._class()(**self.arguments)
        messages = [{"role": "user", "content": question.text}]
        row = {"prompt": messages, "question": question.text, "answer": question.answer} | question.metadata
        parameters = inspect.signature(self._instance.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        added = awaited(self._instance.reset(**row))
        return messages if added is None else [{"role": "user", "content": question.text + str(added)}]

    def step(self, message: Message) -> Turn:
        """Makes the calls in the message; the conversation is done if there is none."""
        turn = Turn()
        for call in message["tool_calls"]:
            name = call.get("name", "tool")
            try:
                if "error" in call or name not in self._names:
                    raise ValueError(call.get("error", f"there is no tool {name}"))
                answer = awaited(getattr(self._instance, name)(**call["arguments"]))
            except MemoryError:
                raise
            except Exception as error:
                answer = {"error": str(error)} if "error" not in call else call["error"]
                turn.num_failed_calls += 1
            turn.messages.append({"role": "tool", "name": name, "content": str(answer)})
        turn.done = not turn.messages
        return turn

    def outcome(self) -> float | None:
        """That of `get_reward`, if there is one."""
        reward = getattr(self._instance, "get_reward", None)
        return None if reward is None else float(awaited(reward()))

    def close(self) -> None:
        """Calls `close` of the class if that is no tool of the policy: TRL knows no such method."""


def methods_of(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods that are tools, by name, in the order of the alphabet as TRL has them."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    return {name: method for name, method in methods if not name.startswith("_") and name not in OWN}


def awaited(value: Any) -> Any:
    """The value; that of an `async def` is awaited."""

    async def run() -> Any:
        return await value

    return event_loop().run_until_complete(run()) if inspect.isawaitable(value) else value


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all calls, so that an instance can keep a client open between them."""
    return asyncio.new_event_loop()


def load(path: str) -> Any:
    """What an import path leads to."""
    module, colon, name = path.rpartition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    key = f"_environment_{Path(module).stem}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, module)
        assert spec is not None and spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return getattr(sys.modules[key], name)
