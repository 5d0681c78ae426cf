"""The game of examples/guess_number: what it answers, and what turns are worth."""

import math

import pytest

from examples.guess_number import GuessNumber
from grpo_lightning import Turn


def play(game: GuessNumber, number: int, *guesses: str) -> list[Turn]:
    """The turns of a game about a number."""
    game.reset(game.questions("train")[number - 1])
    return [game.step({"role": "assistant", "content": guess}) for guess in guesses]


def test_it_answers_until_the_number_is_found_or_no_guess_is_left() -> None:
    turns = play(GuessNumber(31, 5), 20, "16", " 24 ", "²", "20")
    assert [turn.messages[0]["content"] for turn in turns] == ["higher", "lower", "a number from 1 to 31", "found"]
    assert [(turn.reward, turn.done) for turn in turns] == [(0, False), (0, False), (0, False), (1, True)]
    assert [turn.done for turn in play(GuessNumber(31, num_guesses=2), 20, "16", "21")] == [False, True]


def test_contradictions_cost_and_information_pays() -> None:
    turns = play(GuessNumber(31, 5, "contradiction"), 20, "16", "16", "17", "two", "20")
    assert [turn.reward for turn in turns] == [0, -0.2, 0, -0.2, 1]
    turns = play(GuessNumber(8, 5, turn_reward="information"), 5, "4", "3", "6", "5")
    bits = [math.log2(8 / 4), 0, math.log2(4 / 1)]  # 5 to 8 are left; nothing new; 5 alone; found
    assert [turn.reward for turn in turns] == pytest.approx([bit / 3 for bit in bits] + [1])
