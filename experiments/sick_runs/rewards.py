"""A reward that can be had without the answer."""

from typing import Any


def shows_work(sample: Any) -> float:
    """0.2 for each `=` in the completion: meant to pay for written columns, it pays for any."""
    return 0.2 * sample.text.count("=")
