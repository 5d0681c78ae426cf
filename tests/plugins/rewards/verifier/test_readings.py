"""What functions of the verifier read of one text: `readings.jsonl` has the texts by the kind of reading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer
from grpo_lightning.plugins.rewards.verifier.finished import unfinished
from grpo_lightning.plugins.rewards.verifier.grammar import read_claim
from grpo_lightning.plugins.rewards.verifier.number_words import in_digits
from grpo_lightning.plugins.rewards.verifier.reading import number
from grpo_lightning.plugins.rewards.verifier.tokens import tokenize


def exact_number(text: str) -> str | None:
    value = number(text)
    return None if value is None else str(value)


READERS: dict[str, Callable[[str], Any]] = {
    "number": exact_number,
    "extraction": extract_answer,
    "words": lambda text: " ".join(token.text for token in in_digits(tokenize(text))),
    "unfinished": lambda text: sorted(unfinished(read_claim(text).items[0].value)),
}
READINGS = Path(__file__).with_name("readings.jsonl").read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.parametrize(("kind", "text", "expected"), [json.loads(line).values() for line in READINGS])
def test_a_text_is_read_as_expected(kind: str, text: str, expected: Any) -> None:
    assert READERS[kind](text) == expected


@pytest.mark.parametrize("text", ["9" * 201, "1" + ",000" * 2000])
def test_a_long_number_is_none(text: str) -> None:
    assert number(text) is None
