"""The verifier reads what tasks and prompts of the core write."""

import pytest

from grpo_lightning.plugins.data.arithmetic.arithmetic import in_words
from grpo_lightning.plugins.rewards.verifier.math_verifier import MathVerifier
from grpo_lightning.plugins.rewards.verifier.number_words import in_digits
from grpo_lightning.plugins.rewards.verifier.tokens import Token
from grpo_lightning.types import FinishReason, Prompt, Question, Sample


def test_the_verifier_reads_every_number_in_words():
    for number in [*range(1100), *range(1100, 10**9, 7_654_321)]:
        tokens = [Token("word", word, True) for word in in_words(number).split()]
        assert [token.text for token in in_digits(tokens)] == [str(number)], in_words(number)


def sample(prompt: str, text: str, answer_prefix: str = "") -> Sample:
    question = Question("What is 40 + 2?", "42")
    return Sample(Prompt(0, prompt, [1], question, answer_prefix), text, [1], FinishReason.STOP)


@pytest.mark.parametrize(
    ("prefix", "text"),
    [("<answer>", "42</answer>"), (r"So \boxed{", "42}"), ("The answer is", " 42."), ("<think>", "</think>\n#### 42")],
)
def test_an_answer_that_the_prefix_opened_is_found(prefix: str, text: str) -> None:
    verifier = MathVerifier()
    try:
        assert verifier([sample("Q" + prefix, text, prefix)]).value == [1.0]
        assert verifier([sample("Q", text if "####" not in text else "42")]).value == [0.0]
    finally:
        verifier.close()
