"""Where the answer of a completion is."""

import time

import pytest

from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer

LONG_TEXTS = [
    r"\boxed{" * 100_000, r"\boxed{1}, " * 50_000, r"\boxed" + " " * 500_000, "answer is " * 50_000,
    "answer:" + "*" * 500_000, "answer is" + " " * 500_000, "answer is " + ".****" * 100_000,
    "answer is " + "so " * 200_000, "answer is $x$" + " " * 500_000, "answer is $x$," * 50_000,
    "answer is\n\\[" * 50_000, "answer is " + "\\(" * 200_000, "\\boxed{" + "answer is " * 50_000 + "}",
    r"\boxed{1}" + " a   " * 22 + r" zz \boxed{2}", r"$\boxed{1}" + r" \, a ^ 2 " * 90 + "?$",
    "<answer>" * 100_000, "####" * 100_000, "{" * 500_000 + r"\boxed{" + "}" * 500_000,
]  # fmt: skip


@pytest.mark.parametrize("text", LONG_TEXTS)
def test_time_is_linear_in_the_text(text):
    start = time.process_time()
    extract_answer(text)
    assert time.process_time() - start < 20
