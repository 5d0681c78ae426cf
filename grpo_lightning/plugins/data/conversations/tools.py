"""A plain class as an environment, as TRL's `environment_factory` has it: its public methods are tools."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MethodType
from typing import Any

from grpo_lightning.plugins.data.conversations.environment import Environment, Turn
from grpo_lightning.sandbox.main import awaited, module_of
from grpo_lightning.types import Message, Question, UsageError, require

COLUMN = "environment"  # of a question: the name of its class in a dict of them


class ToolEnvironment(Environment):
    """Lets the policy call the methods of a class of your own, until it writes a turn without a call.

    The class is as TRL has it for `environment_factory`, and runs unchanged. `reset(**row)` is given the question's
    columns, and may return text to add to it. Every other public method is a tool; type hints and docstring describe
    it. `get_reward()`, if there is one, returns the reward of the conversation: see `EnvironmentReward`. Methods may be
    `async`. A tool that raises costs nothing: the policy reads the error.

    A path may also lead to a dict of classes, or of functions that make an instance. Then each question names its own
    in the column `environment`, and its conversation has only the tools of that one.

    Args:
        tools: Import path of the class: `my_tools.Calculator` or `path/to/my_tools.py:Calculator`.
        arguments: Arguments of the class.

    Raises:
        UsageError: There is no such class, it has no `reset`, or a tool lacks type hints or a docstring.
    """

    def __init__(self, tools: str, arguments: dict[str, Any] | None = None) -> None:
        self.path = tools
        self.arguments = arguments or {}
        self._tools = {name: self._schemas(factory) for name, factory in factories_at(tools).items()}
        self.tools = [schema for schemas in self._tools.values() for schema in schemas]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Imports the class, once for all processes that are copied from this one."""
        self.__dict__ |= state
        factories_at(self.path)

    def tools_for(self, question: Question) -> Sequence[Mapping[str, Any]]:
        return self._tools[self._name(question)]

    def reset(self, question: Question) -> list[Message]:
        """The turns before the question, the question, and what the class adds to it."""
        name = self._name(question)
        self._instance = factories_at(self.path)[name](**self.arguments)
        messages = [*question.history, {"role": "user", "content": question.text}]
        row = {"prompt": messages, "question": question.text, "answer": question.answer} | question.metadata
        parameters = inspect.signature(self._instance.reset).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            row = {column: row[column] for column in parameters if column in row}
        elif name is not None:
            del row[COLUMN]
        added = awaited(self._instance.reset(**row))
        asked = question.text + ("" if added is None else str(added))
        return [*question.history, {"role": "user", "content": asked}]

    def step(self, message: Message) -> Turn:
        """Makes the calls in the message; the conversation is done if there is none."""
        calls = message.get("tool_calls", [])  # a class without tools is given none
        turn = Turn(done=not calls)
        for call in calls:
            name = call.get("name", "tool")
            answer: Any = call.get("error")
            turn.num_failed_calls += answer is not None
            try:
                answer = answer or awaited(getattr(self._instance, name)(**call["arguments"]))
            except MemoryError:
                raise
            except BaseException as error:  # a tool's sys.exit() ends its call
                reason = str(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
                answer = {"error": reason}
                turn.num_failed_calls += 1
            turn.messages.append({"role": "tool", "name": name, "content": str(answer)})
        return turn

    def outcome(self) -> float | None:
        reward = getattr(self._instance, "get_reward", None)
        return None if reward is None else float(awaited(reward()))

    def _name(self, question: Question) -> str | None:
        """The name of the question's class in the dict; None where there is only one class."""
        name = None if None in self._tools else question.metadata.get(COLUMN, "")
        names = ", ".join(map(str, self._tools))
        row = f"data.environment={self.path}: question {question.source} has {COLUMN}={name!r}"
        require(name in self._tools, f"{row}; give each row a column `{COLUMN}` with one of {names}")
        return name

    def _schemas(self, factory: Callable[..., Any]) -> list[dict[str, Any]]:
        """The JSON schemas of the tools of a class."""
        from transformers.utils import get_json_schema  # a worker that imports the package need not wait for it

        made = factory if isinstance(factory, type) else type(factory(**self.arguments))
        methods = dict(inspect.getmembers(made, inspect.isfunction))
        lacks = f"data.environment={self.path}: {made.__name__} has no method `reset`, which begins a conversation"
        require("reset" in methods, lacks)
        names = [name for name in methods if not name.startswith("_") and name not in ("reset", "get_reward")]
        try:
            return [get_json_schema(MethodType(methods[name], self)) for name in names]
        except Exception as error:  # of transformers, of several kinds
            raise UsageError(
                f"data.environment={self.path}: every tool needs type hints and a docstring with `Args:` ({error})"
            ) from error


@cache
def factories_at(path: str) -> Mapping[str | None, Callable[..., Any]]:
    """The class at `my_tools.Calculator` or `path/to/my_tools.py:Calculator`, by None; a dict there as it is."""
    try:
        source, name = module_of(path)
        found = getattr(source, name, None)
    except Exception as error:  # a module may raise what it likes
        raise UsageError(
            f"data.environment={path}: it cannot be imported ({type(error).__name__}: {error}). Give an import path "
            "such as my_tools.Calculator or path/to/my_tools.py:Calculator"
        ) from error
    if isinstance(found, dict):
        are_classes = bool(found) and all(map(callable, found.values()))
        require(are_classes, f"data.environment={path}: give a dict of classes, or of functions that make an instance")
        return found
    if not isinstance(found, type):
        module, _, name = path.replace(":", ".").rpartition(".")
        raise UsageError(f"data.environment={path}: {module} has no class {name}")
    if issubclass(found, Environment):
        lacks = ", ".join(sorted(found.__abstractmethods__))
        fix = f"it lacks the method {lacks}" if lacks else "give MODULE.CLASS, without .py"
        raise UsageError(f"data.environment={path}: {found.__name__} is an Environment; {fix}")
    return {None: found}
