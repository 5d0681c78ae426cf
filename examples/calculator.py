"""Tools of one's own: a plain class, whose methods the policy calls."""

import math
import re
from typing import Any

MAX_CHARACTERS = 100
EXPRESSION = re.compile(r"[0-9]+(?: *[-+*] *[0-9]+)*")


class Calculator:
    """Calculates sums, differences and products of whole numbers, for a policy that calls it: `data.environment`.

    It knows nothing about the question, so it gives no reward: a verifier judges the policy's last turn.
    """

    def reset(self, **row: Any) -> None:
        """Keeps nothing: every call stands for itself."""

    def calculate(self, expression: str) -> int:
        """Calculates an expression; `*` binds tighter than `+` and `-`.

        Args:
            expression: Whole numbers with +, - or * between them, such as 12+3*4.

        Returns:
            Its value.
        """
        return value_of(expression)


def value_of(expression: str) -> int:
    """The value of numbers with `+`, `-` and `*` between them. The text is untrusted: it is read, never executed."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    if not EXPRESSION.fullmatch(expression.strip(" ")):
        raise ValueError("numbers with +, - or * only")
    terms = re.findall(r"([-+]?)([^-+]+)", expression)
    return sum((-1) ** (sign == "-") * math.prod(map(int, product.split("*"))) for sign, product in terms)
