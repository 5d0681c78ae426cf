"""The game of guessing: what it answers, what turns are worth, and that halving wins it."""

import math

import pytest

from grpo_lightning import GuessNumber, Turn


def play(game: GuessNumber, number: int, *guesses: str) -> list[Turn]:
    """The turns of a game about a number."""
    game.reset(game.questions("train")[number - 1])
    return [game.step({"role": "assistant", "content": guess}) for guess in guesses]


def test_every_split_has_every_number_once() -> None:
    questions = GuessNumber(7).questions("val")
    assert [question.answer for question in questions] == list("1234567")
    assert {question.text for question in questions} == {"Guess a number from 1 to 7."}


def test_it_answers_higher_and_lower_until_the_number_is_found() -> None:
    turns = play(GuessNumber(31, 5), 20, "16", " 24 ", "20")
    assert [turn.messages[0]["content"] for turn in turns] == ["higher", "lower", "found"]
    assert [(turn.reward, turn.done) for turn in turns] == [(0, False), (0, False), (1, True)]


def test_the_last_guess_ends_the_game() -> None:
    turns = play(GuessNumber(31, num_guesses=2), 20, "16", "21")
    assert [(turn.reward, turn.done) for turn in turns] == [(0, False), (0, True)]


@pytest.mark.parametrize("text", ["", "0", "32", "-3", "1e1", "two", "1 2", "²", "٣", "9" * 5000])
def test_what_is_no_number_counts_as_a_guess(text: str) -> None:
    (turn,) = play(GuessNumber(31, 5, "contradiction"), 1, text)
    assert turn.messages[0]["content"] == "a number from 1 to 31"
    assert turn.reward == -1 / 5 and not turn.done


def test_contradictions_cost() -> None:
    turns = play(GuessNumber(31, 5, "contradiction"), 20, "16", "16", "17", "5", "20")
    assert [turn.reward for turn in turns] == [0, -0.2, 0, -0.2, 1]


def test_information_of_the_answers() -> None:
    turns = play(GuessNumber(8, 5, turn_reward="information"), 5, "4", "3", "6", "5")
    bits = [math.log2(8 / 4), 0, math.log2(4 / 1), 0]  # 5 to 8 are left; nothing new; 5 alone; found
    assert [turn.reward for turn in turns] == pytest.approx([bit / 3 for bit in bits[:3]] + [1])
    for number in range(1, 9):
        won = play(GuessNumber(8, 8, "information"), number, *map(str, range(8, 0, -1)))
        won = won[: 9 - number]
        assert sum(turn.reward for turn in won) == pytest.approx(2)
