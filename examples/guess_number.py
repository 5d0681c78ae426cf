"""A game to learn from: guess a number by higher and lower."""

import math
from collections.abc import Sequence
from typing import Literal

from grpo_lightning import Environment, Question, Task, Turn
from grpo_lightning.tasks.task import Split
from grpo_lightning.types import Message, at_least, require


class GuessNumber(Environment, Task):
    """Guess a number; every wrong guess is answered with `higher` or `lower`.

    A found number is worth 1, and ends the game. By halving what is left one finds each of 2^n - 1 numbers in n
    guesses. What is no number from 1 to `highest` counts as a guess too. Every split has each number once: the question
    is always the same, so nothing needs to be held out.

    Args:
        highest: The numbers are 1 to this, 2 to 999.
        num_guesses: Guesses per game. `data.limits.max_turns` must allow them.
        turn_reward: What a turn is worth besides. `contradiction`: a guess that an earlier answer rules out costs
            1 / `num_guesses`. `information`: log(numbers left before / numbers left after) / log(`highest`), which
            sums to 1 over a game that is won. `none`: nothing.

    Raises:
        UsageError: A value is out of range.
    """

    grader = "EnvironmentReward"

    def __init__(
        self,
        highest: int = 7,
        num_guesses: int = 3,
        turn_reward: Literal["none", "contradiction", "information"] = "none",
    ) -> None:
        require(2 <= highest <= 999, f"data.task.highest={highest}: give 2 to 999")
        at_least("data.task.num_guesses", num_guesses, 1)
        self.highest = highest
        self.num_guesses = num_guesses
        self.turn_reward = turn_reward

    def questions(self, split: Split) -> Sequence[Question]:
        """Every number, as the answer to the same question."""
        text = f"Guess a number from 1 to {self.highest}."
        return [Question(text, str(number), f"guess {split}:{number}") for number in range(1, self.highest + 1)]

    def reset(self, question: Question) -> list[Message]:
        """The question."""
        self.target = int(question.answer)
        self.low, self.high = 1, self.highest
        self.num_made = 0
        return [{"role": "user", "content": question.text}]

    def step(self, message: Message) -> Turn:
        """`higher`, `lower`, or the end."""
        self.num_made += 1
        guess = self._guess(message["content"].strip())
        num_possible = self.high - self.low + 1
        is_possible = guess is not None and self.low <= guess <= self.high
        if guess is None:
            answer = f"a number from 1 to {self.highest}"
        elif guess < self.target:
            answer, self.low = "higher", max(self.low, guess + 1)
        elif guess > self.target:
            answer, self.high = "lower", min(self.high, guess - 1)
        else:
            answer, self.low, self.high = "found", guess, guess
        reward = float(guess == self.target)
        match self.turn_reward:
            case "contradiction":
                reward -= (not is_possible) / self.num_guesses
            case "information":
                reward += math.log(num_possible / (self.high - self.low + 1)) / math.log(self.highest)
        done = guess == self.target or self.num_made == self.num_guesses
        return Turn([{"role": "user", "content": answer}], reward, done)

    def _guess(self, text: str) -> int | None:
        """The number that was written, if it is one to guess."""
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(self.highest)) else 0
        return number if 1 <= number <= self.highest else None
