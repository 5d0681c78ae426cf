"""Scripted players of games: what a player was told since its last move -> its move."""

import random
import re


def any_move(told: str) -> str:
    """One of the moves that stand in square brackets in the last line that has any; without one, nothing."""
    offers = [moves for line in told.splitlines() if (moves := re.findall(r"\[[^\[\]]+\]", line))]
    return random.choice(offers[-1]) if offers else ""


def next_hand(told: str) -> str:
    """Rock, paper and scissors in turn: for `IteratedRockPaperScissors-v0`."""
    last = re.findall(r"selects move (\w+)", told)[-1:]
    return {"rock": "[paper]", "paper": "[scissors]"}.get("".join(last), "[rock]")
