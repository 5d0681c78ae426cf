"""What functions of the verifier read of one text: `readings.jsonl` has the texts by the kind of reading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer
from grpo_lightning.plugins.rewards.verifier.finished import num_terms, unfinished
from grpo_lightning.plugins.rewards.verifier.grammar import read_claim
from grpo_lightning.plugins.rewards.verifier.number_words import in_digits
from grpo_lightning.plugins.rewards.verifier.numbers import exact
from grpo_lightning.plugins.rewards.verifier.question import choices_in, words_of
from grpo_lightning.plugins.rewards.verifier.reading import number
from grpo_lightning.plugins.rewards.verifier.sentences import read_sentence
from grpo_lightning.plugins.rewards.verifier.tokens import tokenize
from grpo_lightning.plugins.rewards.verifier.value_comparison import compare


def exact_number(text: str) -> str | None:
    value = number(text)
    return None if value is None else str(value)


QUESTION = (
    "Tom picks 12 apples in 4 weeks and Jane's 7 ducks eat some. How many more does he pick than Jane in 4 weeks?"
)


def value_of_sentence(text: str) -> Any:
    claim = read_sentence(text, words_of(QUESTION), QUESTION)
    assert claim is not None
    return exact(claim.items[0].value)


READERS: dict[str, Callable[[Any], Any]] = {
    "number": exact_number,
    "extraction": extract_answer,
    "words": lambda text: " ".join(token.text for token in in_digits(tokenize(text))),
    "sentence": value_of_sentence,
    "choices": choices_in,
    "unfinished": lambda text: sorted(unfinished(read_claim(text).items[0].value)),
    "num_terms": lambda text: num_terms(read_claim(text).items[0].value),
    "comparison": lambda texts: compare(*texts),
}
READINGS = Path(__file__).with_name("readings.jsonl").read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.parametrize(("kind", "text", "expected"), [json.loads(line).values() for line in READINGS])
def test_a_text_is_read_as_expected(kind: str, text: Any, expected: Any) -> None:
    assert READERS[kind](text) == expected


@pytest.mark.parametrize("text", ["9" * 201, "1" + ",000" * 2000])
def test_a_long_number_is_none(text: str) -> None:
    assert number(text) is None
