"""Calls of tools in what a policy wrote. The text is untrusted: it is read strictly, and a bad call gets an answer."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from grpo_lightning.types import UsageError, at_least

MAX_CHARACTERS, MAX_BRACKETS = 10_000, 200  # of a call that is read; the brackets bound how deep it is nested
Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as `transformers.utils.get_json_schema` makes them


class ToolCall(NamedTuple):
    """A call of a tool that there is, with arguments that it has. Their values are the tool's to check."""

    name: str
    arguments: dict[str, Any]


class BadCall(NamedTuple):
    """A call that cannot be made. `error` tells the policy why: it is the tool's answer."""

    error: str


class ToolFormat(ABC):
    """A form in which policies write calls of tools.

    Args:
        max_calls: Calls in one turn. What comes after them is one bad call.
    """

    stop = ""  # the stop string that ends a turn with its call; empty: the policy ends its turn itself

    def __init__(self, max_calls: int = 4) -> None:
        at_least("max_calls", max_calls, 1, type(self).__name__)
        self.max_calls = max_calls

    @staticmethod
    def for_tokenizer(tokenizer: Any) -> "ToolFormat":
        """The format of the chat template; `PlainTag` where the template knows no tools, or is missing."""
        template = str(tokenizer.chat_template or "")
        if "<tool_call>" in template and '"arguments"' in template:
            return HermesJson()
        if "ipython" in template and '"parameters"' in template:
            return LlamaJson()
        if "tools" in template or "tool_call" in template:
            raise UsageError("the chat template writes calls of tools in a form of its own: give a ToolFormat for it")
        return PlainTag()

    def find(self, text: str, tools: Tools) -> list[ToolCall | BadCall]:
        """The calls in a turn, in order. No text raises an exception."""
        found: list[ToolCall | BadCall] = []
        for index, body in enumerate(islice(self.bodies(text), self.max_calls + 1)):
            try:
                if index == self.max_calls:
                    raise ValueError(f"a turn may make {self.max_calls} calls; the others were not made")
                if body is None or len(body) > MAX_CHARACTERS:
                    raise ValueError(f"the call has no end within {MAX_CHARACTERS} characters")
                found.append(self.read(body, {tool["function"]["name"]: tool["function"] for tool in tools}))
            except ValueError as error:
                found.append(BadCall(f"Error: {error}."))
        return found

    @abstractmethod
    def describe(self, tools: Tools) -> str:
        """The tools and the form of a call, for the system message where the chat template does not show them."""

    @abstractmethod
    def bodies(self, text: str) -> Iterable[str | None]:
        """The text of each call, None for one without an end."""

    @abstractmethod
    def read(self, body: str, functions: Mapping[str, Any]) -> ToolCall:
        """The call with this text; ValueError says what is wrong with it."""


class HermesJson(ToolFormat):
    """`<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`: Qwen 2.5, Qwen 3. Not in thoughts."""

    opening, closing, key = "<tool_call>", "</tool_call>", "arguments"
    kind = ""
    """The value of `type` that a call may have besides."""

    def describe(self, tools: Tools) -> str:
        form = f'{self.opening}{{"name": NAME, "{self.key}": {{ARGUMENT: VALUE}}}}{self.closing}'
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        return "\n".join([f"To call a tool, write {form}. The tools:", *lines])

    def bodies(self, text: str) -> Iterable[str | None]:
        answer = text.rpartition("</think>")[2]
        before_thought = answer.partition("<think>")[0]
        # A thought that has no end goes on to the end of the text. In a call the tag is text as any other.
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

    It may have `"type": "function"` besides, as Llama 3.2 writes it.
    """

    opening, closing, key = "", "", "parameters"
    kind = "function"

    def bodies(self, text: str) -> Iterable[str | None]:
        """The whole turn, if it is meant as a call."""
        body = text.strip().removeprefix("<|python_tag|>")
        return [body] if body != text.strip() or (body.startswith("{") and '"name"' in body) else []


class PlainTag(ToolFormat):
    """`<tool>add 1 2</tool>`, for small models. Where there is one tool, its name is left out: `<tool>1 2</tool>`.

    Arguments come in the order of the schema, with a space between them. The last one is the rest of the text.
    """

    stop = "</tool>"

    def describe(self, tools: Tools) -> str:
        """One line per tool: a call, and what the tool does."""
        lines = ["The tools:"]
        for function in (tool["function"] for tool in tools):
            words = [function["name"]] * (len(tools) > 1) + [*function["parameters"]["properties"]]
            lines.append(f"<tool>{' '.join(words)}</tool> {function['description']}")
        return "\n".join(lines)

    def bodies(self, text: str) -> Iterable[str | None]:
        return _between("<tool>", "</tool>", text)

    def read(self, body: str, functions: Mapping[str, Any]) -> ToolCall:
        """Words: texts as they are, other values as JSON."""
        name, rest = (*functions, body) if len(functions) == 1 else (*body.split(maxsplit=1), "", "")[:2]
        schemas = functions[name]["parameters"]["properties"] if name in functions else {}
        keys = [*schemas] or [""]
        pairs = zip(keys, map(str.strip, rest.split(maxsplit=len(keys) - 1)), strict=False)
        texts = {key for key in keys if "string" in schemas.get(key, {}).get("type", "string")}
        arguments = {key: word if key in texts else read_json(word) for key, word in pairs}
        return _checked(name, arguments, functions)


def _between(opening: str, closing: str, text: str) -> Iterable[str | None]:
    """The texts between two tags; None where the second is missing. Linear in the text."""
    parts = (part.partition(closing) for part in text.split(opening)[1:])
    return (body if closed else None for body, closed, _ in parts)


def read_json(text: str) -> Any:
    """The value of JSON; ValueError where it is none, or too deeply nested."""
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ValueError(f"the call has more than {MAX_BRACKETS} brackets")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the call is not valid JSON ({str(error)[:100]})") from error


def _checked(name: Any, arguments: Any, functions: Mapping[str, Any]) -> ToolCall:
    """The call, if its tool and arguments are those of a schema; ValueError otherwise."""
    if not isinstance(name, str) or name not in functions:
        raise ValueError(f"there is no tool {repr(name)[:60]}; the tools are {', '.join(functions)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are not an object")
    schemas = functions[name]["parameters"]["properties"]
    if missing := [key for key in functions[name]["parameters"].get("required", []) if key not in arguments]:
        raise ValueError(f"{name} lacks the argument {missing[0]}")
    if unknown := [key for key in arguments if key not in schemas]:
        raise ValueError(f"{name} has no argument {repr(unknown[0])[:60]}")
    return ToolCall(name, arguments)
