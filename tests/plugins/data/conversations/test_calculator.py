"""The calculator: what it reads it calculates, and nothing else is executed."""

import random

import pytest
from make_tiny_policy import make_tokenizer

from examples.calculator import MAX_CHARACTERS, value_of
from grpo_lightning import PlainTag, Question, ToolEnvironment

NO_EXPRESSIONS = ["", "+", "1+", "+1", "1++2", "1 2", "1/2", "2**3", "(1+2)", "1_000+1", "0x10", "1e9", "a+1", "1;"]
NO_EXPRESSIONS += ["1\n+2", "١+٢", "__import__('os').getpid()", "1" * (MAX_CHARACTERS + 1)]


def test_values_are_those_of_python() -> None:
    rng = random.Random(0)
    for _ in range(200):
        numbers = [str(rng.randrange(10 ** rng.randint(1, 6))) for _ in range(rng.randint(1, 6))]
        text = numbers[0] + "".join(rng.choice("+-*") + number for number in numbers[1:])
        assert value_of(text) == eval(text, {"__builtins__": {}})


@pytest.mark.parametrize("expression", NO_EXPRESSIONS)
def test_nothing_else_is_read(expression: str) -> None:
    with pytest.raises(ValueError, match=r"numbers with \+, - or \* only|more than 100 characters"):
        value_of(expression)


def test_it_is_a_tool() -> None:
    environment = ToolEnvironment("examples.calculator.Calculator")
    assert environment.reset(Question("12+30=", "42")) == [{"role": "user", "content": "12+30="}]
    calls = PlainTag().find("<tool>12+30</tool><tool>12 30</tool>", environment.tools)
    assert PlainTag.for_tokenizer(make_tokenizer()).stop == "</tool>"
    turn = environment.step({"role": "assistant", "content": "", "tool_calls": [call._asdict() for call in calls]})
    assert [message["content"] for message in turn.messages] == ["42", "{'error': 'numbers with +, - or * only'}"]
    assert turn.num_failed_calls == 1 and not turn.done and environment.outcome() is None
