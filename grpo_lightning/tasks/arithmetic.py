"""Generated sums: a task without data, of any difficulty."""

import math
from collections.abc import Sequence
from hashlib import blake2b

from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.tasks.number_names import in_words
from grpo_lightning.types import Question, UsageError

OPERATORS = ("+", "-", "*")
SPOKEN = {"+": "plus", "-": "minus", "*": "times"}


class Arithmetic(Task):
    """Generated questions such as `47+85=` with the answer `132`.

    A task that needs no data, for tests and first runs. One seeded shuffle holds every expression that the difficulty
    allows, once. Validation takes its first `num_val` expressions, test the next `num_val` (predict asks the same), and
    training the `num_train` after them. So no question is in two splits, and validation and test do not depend on
    `num_train`. `1+2=` and `2+1=` are two questions.

    Args:
        max_digits: Most digits of a number, 1 to 9: numbers are drawn uniformly from 0 to 10^max_digits - 1.
        operators: The operators between the numbers, out of `+`, `-` and `*`; `*` binds tighter.
        num_terms: Numbers per expression, 2 to 8.
        num_train: Number of questions to train on.
        num_val: Number of questions held out for validation, and as many others for test.
        seed: Seed of the shuffle, which is the same on every machine and Python version.
        words: Ask in words, for a model that knows English: `What is forty-seven plus eighty-five?`. Gold answers stay
            in digits.
        sentence: Ask in a sentence with digits and spaces, for a model that knows English: `What is 47 + 85?`.

    Raises:
        UsageError: A value is out of range, `words` and `sentence` are both set, or there are fewer expressions than
            `num_train + 2 * num_val`.
    """

    judge = "MathVerifier"

    def __init__(
        self,
        max_digits: int = 2,
        operators: Sequence[str] = ("+",),
        num_terms: int = 2,
        num_train: int = 8000,
        num_val: int = 500,
        seed: int = 0,
        words: bool = False,
        sentence: bool = False,
    ) -> None:
        _check_range("max_digits", max_digits, 1, 9)
        _check_range("num_terms", num_terms, 2, 8)
        _check_range("num_train", num_train, 1)
        _check_range("num_val", num_val, 1)
        if not operators or not set(operators) <= set(OPERATORS) or len(set(operators)) < len(operators):
            allowed = ", ".join(OPERATORS)
            raise UsageError(f"data.task.operators={list(operators)}: give one or more of {allowed}, each once")
        self.max_digits = max_digits
        self.operators = tuple(operators)
        self.num_terms = num_terms
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        if words and sentence:
            raise UsageError(
                "data.task.words=true and data.task.sentence=true: a question is in words or in digits, set one"
            )
        self.words = words
        self.sentence = sentence
        total = num_train + 2 * num_val
        if total > self.num_expressions:
            raise UsageError(
                f"data.task.num_train={num_train} and data.task.num_val={num_val} need {total} questions "
                f"(num_train + 2 * num_val); max_digits={max_digits}, num_terms={num_terms}, "
                f"operators={list(operators)} allow at most {self.num_expressions}: ask for fewer, or raise "
                "data.task.max_digits or data.task.num_terms"
            )

    @property
    def num_expressions(self) -> int:
        """The number of different expressions that the difficulty allows."""
        return 10 ** (self.max_digits * self.num_terms) * len(self.operators) ** (self.num_terms - 1)

    def questions(self, split: Split) -> Sequence[Question]:
        """The questions of `split`, as in `Task.questions`."""
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
        """The expression with this index, whose digits encode numbers and operators."""
        index, number = divmod(index, 10**self.max_digits)
        expression, spaced, spoken, total, product = str(number), str(number), in_words(number), 0, number
        for _ in range(self.num_terms - 1):
            index, which = divmod(index, len(self.operators))
            index, number = divmod(index, 10**self.max_digits)
            operator = self.operators[which]
            expression += f"{operator}{number}"
            spaced += f" {operator} {number}"
            spoken += f" {SPOKEN[operator]} {in_words(number)}"
            if operator == "*":
                product *= number
            else:
                total += product
                product = number if operator == "+" else -number
        text = f"What is {spoken if self.words else spaced}?" if self.words or self.sentence else f"{expression}="
        return Question(text, str(total + product), source, {"expression": expression})


def shuffled(size: int, count: int, seed: int) -> list[int]:
    """The first `count` elements of a seeded shuffle of `range(size)`, in time and memory of order `count`.

    Fisher-Yates on a range that is never stored: `moved` holds the elements that are not at their index. The random
    numbers are hashes, because `random` may give other integers in another Python version.
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
        raise UsageError(f"data.task.{key}={value}: give {allowed}")
