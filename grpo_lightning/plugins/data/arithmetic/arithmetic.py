"""Generated sums: a task of any difficulty that needs no data."""

import math
from collections.abc import Sequence
from hashlib import blake2b

from grpo_lightning.tasks.task import Split, Task
from grpo_lightning.types import Question, UsageError, at_least, require

OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
"""Operators in words."""

SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ((10**6, "million"), (10**3, "thousand"), (100, "hundred"))


class Arithmetic(Task):
    """Generates questions such as `47+85=` with the answer `132`, for runs without data.

    One seeded shuffle holds every expression that the difficulty allows, once. Validation takes its first `num_val`
    expressions, test the next `num_val` (predict asks the same), and training the `num_train` after them. So no
    question is in two splits, and validation and test do not depend on `num_train`.

    Args:
        max_digits: Most digits of a number, 1 to 9: numbers are uniform from 0 to 10^max_digits - 1.
        operators: The operators between the numbers, out of `+`, `-` and `*`; `*` binds tighter.
        num_terms: Numbers per expression, 2 to 8.
        num_train: Number of questions to train on.
        num_val: Number of questions held out for validation, and as many others for test.
        seed: Seed of the shuffle, which is the same on every machine and Python version.
        words: Ask in words, for a model that knows English: `What is forty-seven plus eighty-five?`. Gold answers stay
            in digits.
        sentence: Ask in a sentence with digits and spaces, for a model that knows English: `What is 47 + 85?`.
    """

    grader = "MathVerifier"

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
        require(1 <= max_digits <= 9, f"data.task.max_digits={max_digits}: give 1 to 9")
        require(2 <= num_terms <= 8, f"data.task.num_terms={num_terms}: give 2 to 8")
        at_least("data.task.num_train", num_train, 1)
        at_least("data.task.num_val", num_val, 1)
        if not 0 < len(operators) == len({*operators} & OPERATORS.keys()):
            raise UsageError(
                f"data.task.operators={list(operators)}: give one or more of {', '.join(OPERATORS)}, each once"
            )
        if words and sentence:
            raise UsageError(
                "data.task.words=true and data.task.sentence=true: a question is in words or in digits, set one"
            )
        self.max_digits = max_digits
        self.operators = tuple(operators)
        self.num_terms = num_terms
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.words = words
        self.sentence = sentence
        self.num_expressions = 10 ** (max_digits * num_terms) * len(operators) ** (num_terms - 1)
        """Expressions that the difficulty allows."""
        num_questions = num_train + 2 * num_val
        if num_questions > self.num_expressions:
            raise UsageError(
                f"data.task.num_train={num_train} and data.task.num_val={num_val} need {num_questions} questions "
                f"(num_train + 2 * num_val); max_digits={max_digits}, num_terms={num_terms}, "
                f"operators={list(operators)} allow at most {self.num_expressions}: "
                "ask for fewer, or raise data.task.max_digits or data.task.num_terms"
            )

    def questions(self, split: Split) -> Sequence[Question]:
        start = {"val": 0, "test": 1, "predict": 1, "train": 2}[split] * self.num_val
        stop = start + (self.num_train if split == "train" else self.num_val)
        indices = shuffled(self.num_expressions, stop, self.seed)[start:]
        return [self._question(index, f"arithmetic {split}:{row}") for row, index in enumerate(indices, 1)]

    def _question(self, index: int, source: str) -> Question:
        """Returns the expression with this index, whose digits encode numbers and operators."""
        index, number = divmod(index, 10**self.max_digits)
        tokens: list[int | str] = [number]
        for _ in range(self.num_terms - 1):
            index, operator_index = divmod(index, len(self.operators))
            index, number = divmod(index, 10**self.max_digits)
            tokens += [self.operators[operator_index], number]
        expression = "".join(map(str, tokens))

        # A sum of products: 1-2*3 is 1+-2*3.
        terms = expression.replace("-", "+-").split("+")
        answer = sum(math.prod(map(int, term.split("*"))) for term in terms)

        if self.words:
            tokens = [in_words(token) if isinstance(token, int) else OPERATORS[token] for token in tokens]
        text = f"What is {' '.join(map(str, tokens))}?" if self.words or self.sentence else f"{expression}="
        return Question(text, str(answer), source, {"expression": expression})


def shuffled(size: int, count: int, seed: int) -> list[int]:
    """Returns the first `count` elements of a seeded shuffle of `range(size)`, in time and memory of order `count`.

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


def in_words(number: int) -> str:
    """Returns a number from 0 to 999,999,999 in words: 123 is `one hundred twenty-three`."""
    assert 0 <= number < 10**9
    for size, name in SCALES:
        if number >= size:
            count, remainder = divmod(number, size)
            return f"{in_words(count)} {name}" + (f" {in_words(remainder)}" if remainder else "")
    if number < len(SMALL):
        return SMALL[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")
