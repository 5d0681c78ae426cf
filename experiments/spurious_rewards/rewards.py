"""Rewards that pay for wrong answers."""

import re
from typing import Any


def wrong_number(sample: Any) -> float:
    """1 for any number but the right one."""
    number = written(sample.text)
    return float(number is not None and number != int(sample.answer))


def ten_too_much(sample: Any) -> float:
    """1 for the right number plus 10."""
    return float(written(sample.text) == int(sample.answer) + 10)


def written(text: str) -> int | None:
    """The number of a completion that is nothing but a number and a full stop: ` 156.`."""
    found = re.fullmatch(r" (\d{1,4})\.", text)
    return int(found.group(1)) if found else None
