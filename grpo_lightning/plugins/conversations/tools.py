"""A plain class as an environment, as TRL's `environment_factory` has it: its public methods are tools."""

import inspect
from functools import cache
from types import MethodType
from typing import Any

from grpo_lightning.plugins.conversations.base import Environment, Turn
from grpo_lightning.sandbox.main import awaited, module_of
from grpo_lightning.types import Message, Question, UsageError


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
        methods = dict(inspect.getmembers(class_at(tools), inspect.isfunction))
        reset = methods.pop("reset", None)
        if reset is None:
            raise UsageError(f"data.environment={tools}: the class has no method `reset`, which begins a conversation")
        parameters = inspect.signature(reset).parameters
        self.columns = None if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) else [*parameters][1:]
        names = [name for name in methods if not name.startswith("_") and name != "get_reward"]
        try:
            self.tools = [get_json_schema(MethodType(methods[name], self)) for name in names]
        except Exception as error:  # of transformers, of several kinds
            raise UsageError(
                f"data.environment={tools}: every tool needs type hints and a docstring with `Args:` ({error})"
            ) from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Imports the class, once for all processes that are copied from this one."""
        self.__dict__ |= state
        class_at(self.path)

    def reset(self, question: Question) -> list[Message]:
        """The question, and what the class adds to it."""
        self._instance = class_at(self.path)(**self.arguments)
        messages = [{"role": "user", "content": question.text}]
        row = {"prompt": messages, "question": question.text, "answer": question.answer} | question.metadata
        row = {name: value for name, value in row.items() if self.columns is None or name in self.columns}
        added = awaited(self._instance.reset(**row))
        return messages if added is None else [{"role": "user", "content": question.text + str(added)}]

    def step(self, message: Message) -> Turn:
        """Makes the calls in the message; the conversation is done if there is none."""
        turn = Turn(done=not message["tool_calls"])
        for call in message["tool_calls"]:
            name, answer = call.get("name", "tool"), call.get("error")
            turn.num_failed_calls += answer is not None
            try:
                answer = answer or awaited(getattr(self._instance, name)(**call["arguments"]))
            except MemoryError:
                raise
            except Exception as error:
                answer = {"error": str(error)}
                turn.num_failed_calls += 1
            turn.messages.append({"role": "tool", "name": name, "content": str(answer)})
        return turn

    def outcome(self) -> float | None:
        reward = getattr(self._instance, "get_reward", None)
        return None if reward is None else float(awaited(reward()))


@cache
def class_at(path: str) -> type:
    """The class at `my_tools.Calculator` or `path/to/my_tools.py:Calculator`."""
    try:
        source, name = module_of(path)
        found = getattr(source, name, None)
    except Exception as error:  # a module may raise what it likes
        raise UsageError(
            f"data.environment={path}: it cannot be imported ({type(error).__name__}: {error}). Give an import path "
            "such as my_tools.Calculator or path/to/my_tools.py:Calculator"
        ) from error
    if not isinstance(found, type):
        module, _, name = path.replace(":", ".").rpartition(".")
        raise UsageError(f"data.environment={path}: {module} has no class {name}")
    if issubclass(found, Environment):
        lacks = ", ".join(sorted(found.__abstractmethods__))
        fix = f"it lacks the method {lacks}" if lacks else "give MODULE.CLASS, without .py"
        raise UsageError(f"data.environment={path}: {found.__name__} is an Environment; {fix}")
    return found
