"""The reward that run.yaml names. It may be any function of one sample that returns a number."""

from typing import Any


def brief(sample: Any) -> float:
    """1 for a right answer, and a little less per token: the shorter the better."""
    right = f"<answer>{sample.answer}</answer>" in sample.text
    return right - 0.01 * len(sample.token_ids)
