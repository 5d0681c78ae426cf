"""An environment from a plain class, as for TRL's `environment_factory`: its public methods are tools."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MethodType
from typing import Any

from grpo_lightning.plugins.data.conversations.environment import Environment, Turn
from grpo_lightning.sandbox.main import awaited, module_of
from grpo_lightning.types import Message, Question, UsageError

COLUMN = "environment"
"""The column of a question with the name of its class, in a dict of classes."""


class ToolEnvironment(Environment):
    """Lets the policy call the methods of a class that you write, until it writes a turn without a call.

    A class for TRL's `environment_factory` runs unchanged. `reset(**row)` receives the question's columns, and may
    return text to add to the question. Every other public method is a tool; type hints and docstring describe it. The
    method `get_reward()` may return the reward of the conversation: see `EnvironmentReward`. Methods may be `async`. A
    tool that raises costs nothing: the policy reads the error.

    The path may also lead to a dict of classes, or of functions that make an instance. Then the column `environment` of
    each question names its class, and the question's conversation has only the tools of this class.

    Args:
        tools: Import path of the class: `my_tools.Calculator` or `path/to/my_tools.py:Calculator`.
        arguments: Arguments of the class.

    Raises:
        UsageError: There is no such class, it has no `reset`, or a tool lacks type hints or a docstring.
    """

    def __init__(self, tools: str, arguments: dict[str, Any] | None = None) -> None:
        self.path = tools
        self.arguments = arguments or {}
        self._schemas_by_class = {name: self._schemas(factory) for name, factory in factories_at(tools).items()}
        self.tools = [schema for schemas in self._schemas_by_class.values() for schema in schemas]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Imports the class, once for all copies of this process."""
        self.__dict__ |= state
        factories_at(self.path)

    def tools_for(self, question: Question) -> Sequence[Mapping[str, Any]]:
        return self._schemas_by_class[self._name(question)]

    def reset(self, question: Question) -> list[Message]:
        """Returns the turns before the question, and the question with the text that the class adds to it."""
        name = self._name(question)
        self._instance = factories_at(self.path)[name](**self.arguments)
        messages = [*question.history, {"role": "user", "content": question.text}]
        row = {"prompt": messages, "question": question.text, "answer": question.answer} | question.metadata
        parameters = inspect.signature(self._instance.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {column: row[column] for column in parameters if column in row}
        elif name is not None:
            del row[COLUMN]
        added_text = awaited(self._instance.reset(**row))
        text = question.text + ("" if added_text is None else str(added_text))
        return [*question.history, {"role": "user", "content": text}]

    def step(self, message: Message) -> Turn:
        """Makes the calls in the message; the conversation is done if there is none."""
        calls = message.get("tool_calls", [])  # absent for a class without tools
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
        """Returns the name of the question's class in the dict; None where there is only one class."""
        name = None if None in self._schemas_by_class else question.metadata.get(COLUMN, "")
        if name not in self._schemas_by_class:
            raise UsageError(
                f"data.environment={self.path}: question {question.source} has {COLUMN}={name!r}; "
                f"give each row a column `{COLUMN}` with one of {', '.join(map(str, self._schemas_by_class))}"
            )
        return name

    def _schemas(self, factory: Callable[..., Any]) -> list[dict[str, Any]]:
        """Returns the JSON schemas of the tools of a class."""
        from transformers.utils import get_json_schema  # a worker that imports the package need not wait for it

        kind = factory if isinstance(factory, type) else type(factory(**self.arguments))
        methods = dict(inspect.getmembers(kind, inspect.isfunction))
        if "reset" not in methods:
            raise UsageError(
                f"data.environment={self.path}: {kind.__name__} has no method `reset`, which begins a conversation"
            )
        names = [name for name in methods if not name.startswith("_") and name not in ("reset", "get_reward")]
        try:
            return [get_json_schema(MethodType(methods[name], self)) for name in names]
        except Exception as error:  # transformers raises several kinds
            raise UsageError(
                f"data.environment={self.path}: every tool needs type hints and a docstring with `Args:` ({error})"
            ) from error


@cache
def factories_at(path: str) -> Mapping[str | None, Callable[..., Any]]:
    """Returns the classes, or functions that make instances, at an import path, by their names.

    Args:
        path: Such as `my_tools.Calculator` or `path/to/my_tools.py:Calculator`.

    Returns:
        The dict that the path leads to. A class that the path leads to has the name None.
    """
    try:
        source, name = module_of(path)
        target = getattr(source, name, None)
    except Exception as error:  # a module may raise any exception
        raise UsageError(
            f"data.environment={path}: it cannot be imported ({type(error).__name__}: {error}). Give an import path "
            "such as my_tools.Calculator or path/to/my_tools.py:Calculator"
        ) from error
    if isinstance(target, dict):
        if not target or not all(map(callable, target.values())):
            raise UsageError(f"data.environment={path}: give a dict of classes, or of functions that make an instance")
        return target
    if not isinstance(target, type):
        module, _, name = path.replace(":", ".").rpartition(".")
        raise UsageError(f"data.environment={path}: {module} has no class {name}")
    # An `Environment` comes here as a path where it could not be made: it is abstract, or named by its file.
    if issubclass(target, Environment):
        missing_methods = ", ".join(sorted(target.__abstractmethods__))
        advice = f"it lacks the method {missing_methods}" if missing_methods else "give MODULE.CLASS, without .py"
        raise UsageError(f"data.environment={path}: {target.__name__} is an Environment; {advice}")
    return {None: target}
