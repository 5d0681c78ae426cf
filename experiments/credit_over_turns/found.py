"""Whether a game ended with the number. In every arm it decides what validation counts as right."""

from typing import Any


def found(sample: Any) -> bool:
    """Whether the last guess is the number."""
    return bool(sample.text.strip() == sample.answer)
