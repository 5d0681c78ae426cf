"""Generated sums: a task without data, whose difficulty is a number."""

import math
from collections.abc import Sequence
from hashlib import blake2b

from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.types import Question, UsageError

OPERATORS = ("+", "-", "*")


class Arithmetic(Task):
    """Generated questions such as `47+85=` with the answer `132`.

    Every expression that the difficulty allows stands once in one seeded shuffle; validation takes its first
    `num_val` expressions, test the next `num_val` (predict asks the same ones), training the `num_train` that
    follow. So no question is in two splits, and validation and test stay the same when `num_train` changes.
    `1+2=` and `2+1=` are two questions.

    Args:
        digits: Most digits of a number, 1 to 9: numbers are drawn evenly from 0 to 10^digits - 1.
        operators: Which of `+`, `-` and `*` stand between the numbers; `*` binds tighter.
        terms: Numbers in one expression, 2 to 8.
        num_train: Questions to train on.
        num_val: Questions held out for validation, and as many others for test.
        seed: Seed of the shuffle; the same on every machine and Python version.

    Raises:
        UsageError: A value is out of range, or there are fewer expressions than `num_train + 2 * num_val`.
    """

    def __init__(
        self,
        digits: int = 2,
        operators: Sequence[str] = ("+",),
        terms: int = 2,
        num_train: int = 8000,
        num_val: int = 500,
        seed: int = 0,
    ) -> None:
        _check_range("digits", digits, 1, 9)
        _check_range("terms", terms, 2, 8)
        _check_range("num_train", num_train, 1)
        _check_range("num_val", num_val, 1)
        if not operators or not set(operators) <= set(OPERATORS) or len(set(operators)) < len(operators):
            raise UsageError(f"task.operators={list(operators)}: give one or more of {', '.join(OPERATORS)}, each once")
        self.digits = digits
        self.operators = tuple(operators)
        self.terms = terms
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        total = num_train + 2 * num_val
        if total > self.num_expressions:
            raise UsageError(
                f"task.num_train={num_train} and task.num_val={num_val} need {total} questions "
                f"(num_train + 2 * num_val); digits={digits}, terms={terms}, operators={list(operators)} "
                f"allow at most {self.num_expressions}: ask for fewer, or raise task.digits or task.terms"
            )

    @property
    def num_expressions(self) -> int:
        """How many different expressions the difficulty allows."""
        return 10 ** (self.digits * self.terms) * len(self.operators) ** (self.terms - 1)

    def questions(self, split: Split) -> Sequence[Question]:
        """The rows of `split`; see `Task.questions`."""
        match split:
            case "val":
                start, stop = 0, self.num_val
            case "test" | "predict":
                start, stop = self.num_val, 2 * self.num_val
            case "train":
                start, stop = 2 * self.num_val, 2 * self.num_val + self.num_train
            case _:
                raise UsageError(f"split={split!r} of Arithmetic: use train, val, test or predict")
        indices = shuffled(self.num_expressions, stop, self.seed)[start:]
        return [self._question(index, f"arithmetic {split}:{row}") for row, index in enumerate(indices, 1)]

    def _question(self, index: int, source: str) -> Question:
        """The expression with number `index`, its numbers and operators being the digits of the index."""
        index, number = divmod(index, 10**self.digits)
        expression, total, product = str(number), 0, number
        for _ in range(self.terms - 1):
            index, which = divmod(index, len(self.operators))
            index, number = divmod(index, 10**self.digits)
            operator = self.operators[which]
            expression += f"{operator}{number}"
            if operator == "*":
                product *= number
            else:
                total += product
                product = number if operator == "+" else -number
        return Question(f"{expression}=", str(total + product), source, {"expression": expression})


def shuffled(size: int, count: int, seed: int) -> list[int]:
    """The first `count` elements of a seeded shuffle of `range(size)`, in time and memory of order `count`.

    Fisher-Yates on a range that is never written out: `moved` holds the places that differ from it. The
    random numbers are hashes, because `random` promises no fixed sequence of integers across Python versions.
    """
    moved: dict[int, int] = {}
    order = []
    for i in range(count):
        noise = int.from_bytes(blake2b(f"{seed}:{i}".encode()).digest(), "big")
        j = i + noise % (size - i)
        order.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return order


def _check_range(key: str, value: int, low: int, high: float = math.inf) -> None:
    if not low <= value <= high:
        allowed = f"{low} to {high}" if high < math.inf else f"{low} or more"
        raise UsageError(f"task.{key}={value}: give {allowed}")
