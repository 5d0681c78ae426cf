"""Calls of tools: what fits is found, and whatever else a policy writes is answered with one sentence."""

import json
import random
from typing import Any, Literal

import pytest
from helpers.chats import TEMPLATES, add, byte_level, chat_tokenizer
from make_tiny_policy import make_tokenizer
from transformers.utils import get_json_schema

from grpo_lightning.plugins.data.conversations.tool_calls import (
    MAX_BRACKETS,
    MAX_CHARACTERS,
    BadCall,
    HermesJson,
    LlamaJson,
    PlainTag,
    ToolCall,
    ToolFormat,
)
from grpo_lightning.types import UsageError


def look(
    query: str,
    limit: float = 1.0,
    exact: bool = False,
    order: Literal["up", "down"] = "up",
    pages: list[int] | None = None,
    key: int | str = 0,
) -> str:
    """Looks something up.

    Args:
        query: What.
        limit: How much.
        exact: Whether.
        order: Which way.
        pages: Where.
        key: Who.
    """
    return query


def evaluate(expression: str) -> str:
    """The value of an expression.

    Args:
        expression: Such as 12+30.
    """
    return expression


def now() -> str:
    """The time."""
    return ""


ADD, LOOK, EVALUATE, NOW = map(get_json_schema, (add, look, evaluate, now))
TOOLS = [ADD, LOOK, EVALUATE, NOW]
GOOD = ToolCall("add", {"a": 12, "b": 30})
GOOD_JSON = '{"name": "add", "arguments": {"a": 12, "b": 30}}'


def hermes(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def error_of(form: ToolFormat, text: str, tools: Any = TOOLS) -> str:
    """The one error in a text, of which the policy reads one short sentence."""
    (call,) = form.find(text, tools)
    assert isinstance(call, BadCall), call
    assert call.error.startswith("Error: ") and call.error.endswith(".")
    assert len(call.error) < 400 and call.error.encode()
    return call.error


def test_calls_of_qwen() -> None:
    form = HermesJson()
    assert form.find(f"I add.\n<tool_call>\n{GOOD_JSON}\n</tool_call>", TOOLS) == [GOOD]
    two = hermes(GOOD_JSON) + "\n" + hermes('{"arguments": {}, "name": "now"}')
    assert form.find(two, TOOLS) == [GOOD, ToolCall("now", {})]
    assert form.find("No call: </tool_call> {}", TOOLS) == []
    assert form.find(f"<think>{hermes('x')}</think>{hermes(GOOD_JSON)}", TOOLS) == [GOOD]
    assert form.find(f"<think>{hermes(GOOD_JSON)}</think>No.", TOOLS) == []
    assert form.find(f"<think>maybe {hermes(GOOD_JSON)}", TOOLS) == []
    assert form.find(f"<think>a</think>{hermes(GOOD_JSON)}<think>{hermes(GOOD_JSON)}", TOOLS) == [GOOD]
    tag = {"name": "evaluate", "arguments": {"expression": "<think>"}}
    assert form.find(hermes(json.dumps(tag)), TOOLS) == [ToolCall("evaluate", {"expression": "<think>"})]
    assert "alone" in error_of(form, hermes(GOOD_JSON.replace("{", '{"type": "function", ', 1)))
    assert form.stop == ""


def test_calls_of_llama() -> None:
    form, call = LlamaJson(), GOOD_JSON.replace("arguments", "parameters")
    assert form.find(call, TOOLS) == form.find(f"<|python_tag|>{call}\n", TOOLS) == [GOOD]
    assert form.find(call.replace("{", '{"type": "function", ', 1), TOOLS) == [GOOD]
    assert "alone" in error_of(form, call.replace("{", '{"type": "other", ', 1))
    assert form.find(f"The call is {call}", TOOLS) == form.find('{"answer": 42}', TOOLS) == form.find("", TOOLS) == []
    assert "not valid JSON" in error_of(form, f"{call}; {call}")
    assert "not valid JSON" in error_of(form, "<|python_tag|>add.call(a=1)")
    assert 'the keys "name" and "parameters" alone' in error_of(form, GOOD_JSON)


def test_calls_of_small_models() -> None:
    form = PlainTag()
    assert form.stop == "</tool>"
    assert form.find("<think>So</think><tool>add 12 30</tool>", TOOLS) == [GOOD]
    assert form.find("<tool>12 30</tool>", [ADD]) == [GOOD]
    assert form.find("<tool>now</tool><tool> evaluate  12 + 30 </tool>", TOOLS) == [
        ToolCall("now", {}),
        ToolCall("evaluate", {"expression": "12 + 30"}),
    ]
    assert form.find("<tool>12+30</tool>", [EVALUATE]) == [ToolCall("evaluate", {"expression": "12+30"})]
    assert form.find("<tool></tool>", [NOW]) == [ToolCall("now", {})]
    assert form.find("<tool>look it 2 true down [1,2] a b</tool>", TOOLS) == [
        ToolCall("look", {"query": "it", "limit": 2, "exact": True, "order": "down", "pages": [1, 2], "key": "a b"})
    ]
    assert form.find("12+30</tool>", TOOLS) == []


BAD_TAGS = [
    (TOOLS, "sub 1 2", "there is no tool 'sub'; the tools are add, look, evaluate, now"),
    (TOOLS, "", "there is no tool ''; the tools are"), (TOOLS, "add 1", "add lacks the argument b"),
    (TOOLS, "add", "add lacks the argument a"), (TOOLS, "add 1 x", "not valid JSON"),
    (TOOLS, "add 1 2 3", "not valid JSON (Extra data"), (TOOLS, "now and then", "now has no argument"),
    (TOOLS, "look it 2 true up x", "not valid JSON"),
    ([ADD], "add 1 2", "Error: the call is not valid JSON"), ([NOW], "x", "now has no argument"),
    ([], "x", "there is no tool 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "body", "error"), BAD_TAGS)
def test_bad_calls_of_small_models(tools: Any, body: str, error: str) -> None:
    assert error in error_of(PlainTag(), f"<tool>{body}</tool>", tools)


def arguments(text: str) -> str:
    return f'{{"name": "look", "arguments": {text}}}'


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "not valid JSON"),
        (GOOD_JSON + GOOD_JSON, "not valid JSON (Extra data"),
        ("[]", 'the keys "name" and "arguments" alone'),
        ('{"name": "add"}', 'the keys "name" and "arguments" alone'),
        ('{"name": "add", "arguments": {}, "id": 1}', 'the keys "name" and "arguments" alone'),
        ('{"name": ["add"], "arguments": {}}', "there is no tool ['add']"),
        ('{"name": "Add", "arguments": {"a": 1, "b": 2}}', "there is no tool 'Add'"),
        ('{"name": "add", "arguments": "{}"}', "the arguments of add are not an object"),
        ('{"name": "add", "arguments": {"a": 1}}', "add lacks the argument b"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2, "self": 3}}', "add has no argument 'self'"),
        (arguments('{"query": "a\nb"}'), "not valid JSON"),
        (arguments('{"query": 1%s}' % ("0" * 5000)), "not valid JSON"),
        ("[" * 9000 + "]" * 900, f"more than {MAX_BRACKETS} brackets"),
        (arguments('{"query": "%s"}' % ("x" * MAX_CHARACTERS)), f"no end within {MAX_CHARACTERS} characters"),
        (arguments('{"query": "", "%s": 1}' % ("x" * 5000)), "look has no argument 'xxx"),
        ("\x00", "not valid JSON"),
    ],
)
def test_bad_calls(body: str, error: str) -> None:
    assert error in error_of(HermesJson(), hermes(body))


def test_values_come_as_json_has_them() -> None:
    text = '{"query": "é\\ud83d\\ude00", "limit": 2, "exact": true, "order": "down", "pages": [1], "key": "k"}'
    (call,) = HermesJson().find(hermes(arguments(text)), TOOLS)
    assert call == ToolCall("look", json.loads(text))
    assert HermesJson().find(hermes(arguments('{"query": "", "pages": null, "key": 3}')), TOOLS) == [
        ToolCall("look", {"query": "", "pages": None, "key": 3})
    ]


def test_a_call_without_an_end() -> None:
    assert "no end" in error_of(HermesJson(), f"<tool_call>{GOOD_JSON}")
    assert "no end" in error_of(PlainTag(), "<tool>add 1 2")
    found = HermesJson().find(f"<tool_call>{hermes(GOOD_JSON)}", TOOLS)
    assert isinstance(found[0], BadCall) and found[1:] == [GOOD]


@pytest.mark.parametrize("max_calls", [1, 3])
def test_calls_beyond_the_limit_are_one_error(max_calls: int) -> None:
    for form, text in ((HermesJson(max_calls), hermes(GOOD_JSON)), (PlainTag(max_calls), "<tool>add 12 30</tool>")):
        assert form.find(text * max_calls, TOOLS) == [GOOD] * max_calls
        *calls, beyond = form.find(text * 50_000, TOOLS)
        assert calls == [GOOD] * max_calls
        assert beyond == BadCall(f"Error: a turn may make {max_calls} calls; the others were not made.")
    # Bad calls count too.
    assert [*map(type, HermesJson(max_calls).find("<tool_call>" * 50_000, TOOLS))] == [BadCall] * (max_calls + 1)


ALPHABET = ["<tool_call>", "</tool_call>", "<tool>", "</tool>", "<|python_tag|>", "</think>", '"name"', '"arguments"']
ALPHABET += [
    '"parameters"', "add", '"add"', "look", "{", "}", "[", "]", ":", ",", " ", "1", '"a"', "-", "NaN", "é", "\\u",
]  # fmt: skip
ALPHABET += [hermes(GOOD_JSON), "<tool>add 12 30</tool>", GOOD_JSON.replace("arguments", "parameters")]
ALPHABET += ["\n", "\x00", "true", "null", "1e9", GOOD_JSON, '"', "\ufffd", "0" * 5000]


@pytest.mark.parametrize("form", [HermesJson(), LlamaJson(), PlainTag()], ids=lambda form: type(form).__name__)
def test_no_text_raises_an_exception(form: ToolFormat) -> None:
    rng = random.Random(0)
    good = bad = 0
    for _ in range(1000):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(20)))
        for tools in ([ADD], TOOLS, []):
            for found in form.find(text, tools):
                if isinstance(found, ToolCall):
                    good += 1
                    assert tools and found.name in [tool["function"]["name"] for tool in tools]
                else:
                    bad += 1
                    assert len(found.error) < 400
    assert bad > 0 and good > 0


def test_descriptions_have_the_form_and_the_tools() -> None:
    assert PlainTag().describe([EVALUATE]) == "The tools:\n<tool>expression</tool> The value of an expression."
    first, line = LlamaJson().describe([NOW]).splitlines()
    assert first == 'To call a tool, write {"name": NAME, "parameters": {ARGUMENT: VALUE}}. The tools:'
    assert json.loads(line)["name"] == "now"


def test_the_format_is_that_of_the_template() -> None:
    expected = {"qwen_2_5": HermesJson, "qwen_3": HermesJson, "llama_3": LlamaJson}
    for name in TEMPLATES:
        assert type(ToolFormat.for_tokenizer(chat_tokenizer(name))) is expected.get(name, PlainTag), name
    assert type(ToolFormat.for_tokenizer(make_tokenizer())) is PlainTag
    tokenizer = byte_level("chatml")
    tokenizer.chat_template = "{% for t in tools %}<tool_call><function={{ t.name }}>{% endfor %}"
    with pytest.raises(UsageError, match="a form of its own: give a ToolFormat"):
        ToolFormat.for_tokenizer(tokenizer)
