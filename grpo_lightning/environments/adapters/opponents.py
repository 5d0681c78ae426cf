"""Scripted players of games: what a player was told since its last move -> its move."""

import random
import re


def any_move(told: str) -> str:
    """One of the moves that stand in square brackets in the last line that has any; without one, nothing."""
    offers = [moves for line in told.splitlines() if (moves := re.findall(r"\[[^\[\]]+\]", line))]
    return random.choice(offers[-1]) if offers else ""


def any_of_nim(told: str) -> str:
    """Any move of `Nim-v0` that the piles allow, which were told last; without one, nothing."""
    piles = re.findall(r"pile (\d+): (\d+)", told.rpartition("Current Pile:")[2])
    moves = [f"[{pile} {number}]" for pile, left in piles for number in range(1, int(left) + 1)]
    return random.choice(moves) if moves else ""
