"""Calls of tools in what a policy wrote. The text is untrusted: it is read strictly, and a bad call gets an answer."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from grpo_lightning.types import UsageError, at_least

MAX_CHARACTERS = 10_000
"""Length of a call that is read."""
MAX_BRACKETS = 200
"""Opening brackets of a call that is read; they bound how deep it is nested."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas, as `transformers.utils.get_json_schema` makes them."""


class ToolCall(NamedTuple):
    """A call of a tool that there is, with arguments that it has. Their values are the tool's to check."""

    name: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """Values by the names of the tool's parameters."""


class BadCall(NamedTuple):
    """A call that cannot be made."""

    error: str
    """The reason, for the policy: it becomes the tool's answer."""


class ToolFormat(ABC):
    """A form in which policies write calls of tools.

    Args:
        max_calls: Calls in one turn. All further calls count as a single bad call.
    """

    stop = ""
    """The stop string that ends a turn with its call; empty: the policy ends its turn itself."""

    def __init__(self, max_calls: int = 4) -> None:
        at_least("max_calls", max_calls, 1, type(self).__name__)
        self.max_calls = max_calls

    @staticmethod
    def for_tokenizer(tokenizer: Any) -> "ToolFormat":
        """Returns the format of the chat template; `PlainTag` where the template knows no tools, or is missing."""
        template = str(tokenizer.chat_template or "")
        if "<tool_call>" in template and '"arguments"' in template:
            return HermesJson()
        if "ipython" in template and '"parameters"' in template:
            return LlamaJson()
        if "tools" in template or "tool_call" in template:
            raise UsageError("the chat template writes calls of tools in a form of its own: give a ToolFormat for it")
        return PlainTag()

    def find(self, text: str, tools: Tools) -> list[ToolCall | BadCall]:
        """Returns the calls in a turn, in order. No text raises an exception."""
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        calls: list[ToolCall | BadCall] = []
        for index, body in enumerate(islice(self.bodies(text), self.max_calls + 1)):
            try:
                if index == self.max_calls:
                    raise ValueError(f"a turn may make {self.max_calls} calls; the others were not made")
                if body is None or len(body) > MAX_CHARACTERS:
                    raise ValueError(f"the call has no end within {MAX_CHARACTERS} characters")
                calls.append(self.read(body, functions))
            except ValueError as error:
                calls.append(BadCall(f"Error: {error}."))
        return calls

    @abstractmethod
    def describe(self, tools: Tools) -> str:
        """Describes the tools and the form of a call, for the system message where the chat template does not."""

    @abstractmethod
    def bodies(self, text: str) -> Iterable[str | None]:
        """Returns the text of each call, None for a call without an end."""

    @abstractmethod
    def read(self, body: str, functions: Mapping[str, Any]) -> ToolCall:
        """Returns the call with this text. Raises ValueError with the reason where it is a bad call.

        Args:
            body: The text of the call.
            functions: JSON schemas of the tools, by name.
        """


class HermesJson(ToolFormat):
    """`<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`: Qwen 2.5, Qwen 3. Not in thoughts."""

    opening = "<tool_call>"
    """The tag before a call."""
    closing = "</tool_call>"
    """The tag after a call."""
    key = "arguments"
    """The key of the arguments."""
    kind = ""
    """The value of `type` that a call may have besides."""

    def describe(self, tools: Tools) -> str:
        form = f'{self.opening}{{"name": NAME, "{self.key}": {{ARGUMENT: VALUE}}}}{self.closing}'
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        return "\n".join([f"To call a tool, write {form}. The tools:", *lines])

    def bodies(self, text: str) -> Iterable[str | None]:
        answer = text.rpartition("</think>")[2]
        before_thought = answer.partition("<think>")[0]
        # A thought without an end fills the rest of the text. Inside a call its tag is plain text.
        is_in_call = before_thought.count(self.opening) > before_thought.count(self.closing)
        return _between(self.opening, self.closing, answer if is_in_call else before_thought)

    def read(self, body: str, functions: Mapping[str, Any]) -> ToolCall:
        call = read_json(body)
        if self.kind and isinstance(call, dict) and call.get("type") == self.kind:
            del call["type"]
        if not isinstance(call, dict) or call.keys() != {"name", self.key}:
            raise ValueError(f'a call is an object with the keys "name" and "{self.key}" alone')
        return _checked(call["name"], call[self.key], functions)


class LlamaJson(HermesJson):
    """`{"name": "add", "parameters": {"a": 1, "b": 2}}` as the whole turn, perhaps after `<|python_tag|>`: Llama 3.

    The call may have `"type": "function"` besides, as Llama 3.2 writes it.
    """

    opening = ""
    closing = ""
    key = "parameters"
    kind = "function"

    def bodies(self, text: str) -> Iterable[str | None]:
        """Returns the whole turn, if it is meant as a call."""
        turn = text.strip()
        body = turn.removeprefix("<|python_tag|>")
        return [body] if body != turn or (body.startswith("{") and '"name"' in body) else []


class PlainTag(ToolFormat):
    """`<tool>add 1 2</tool>`, for small models. Where there is one tool, its name is left out: `<tool>1 2</tool>`.

    Arguments come in the order of the schema, with a space between them. The last argument takes all remaining text.
    """

    stop = "</tool>"

    def describe(self, tools: Tools) -> str:
        """Returns a line per tool: a call, and the description of the tool."""
        lines = ["The tools:"]
        for function in (tool["function"] for tool in tools):
            words = [function["name"]] * (len(tools) > 1) + [*function["parameters"]["properties"]]
            lines.append(f"<tool>{' '.join(words)}</tool> {function['description']}")
        return "\n".join(lines)

    def bodies(self, text: str) -> Iterable[str | None]:
        return _between("<tool>", "</tool>", text)

    def read(self, body: str, functions: Mapping[str, Any]) -> ToolCall:
        """Reads the arguments of type string as they stand, and the others as JSON."""
        # A tool is named only where there are several.
        if len(functions) == 1:
            [name] = functions
        else:
            name, body = [*body.split(maxsplit=1), "", ""][:2]
        schemas = functions[name]["parameters"]["properties"] if name in functions else {}

        # Text after a tool without parameters is an argument without a name, which is refused.
        keys = [*schemas] or [""]
        arguments = {}
        for key, word in zip(keys, map(str.strip, body.split(maxsplit=len(keys) - 1)), strict=False):
            is_text = "string" in schemas.get(key, {}).get("type", "string")
            arguments[key] = word if is_text else read_json(word)
        return _checked(name, arguments, functions)


def _between(opening: str, closing: str, text: str) -> Iterable[str | None]:
    """Yields the texts between two tags; None where the second tag is missing. Takes time linear in the text."""
    for text_after in text.split(opening)[1:]:
        body, tag, _ = text_after.partition(closing)
        yield body if tag else None


def read_json(text: str) -> Any:
    """Returns the value of JSON. Raises ValueError where the text is no JSON, or too deeply nested."""
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ValueError(f"the call has more than {MAX_BRACKETS} brackets")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the call is not valid JSON ({str(error)[:100]})") from error


def _checked(name: Any, arguments: Any, functions: Mapping[str, Any]) -> ToolCall:
    """Returns the call. Raises ValueError where no schema has its tool and arguments."""
    if not isinstance(name, str) or name not in functions:
        raise ValueError(f"there is no tool {repr(name)[:60]}; the tools are {', '.join(functions)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are not an object")
    schemas = functions[name]["parameters"]["properties"]
    if missing_keys := [key for key in functions[name]["parameters"].get("required", []) if key not in arguments]:
        raise ValueError(f"{name} lacks the argument {missing_keys[0]}")
    if unknown_keys := [key for key in arguments if key not in schemas]:
        raise ValueError(f"{name} has no argument {repr(unknown_keys[0])[:60]}")
    return ToolCall(name, arguments)
