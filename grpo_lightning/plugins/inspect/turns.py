"""The turns of a conversation as they are recorded: who wrote which tokens, and what a turn was worth."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from grpo_lightning.types import Conversation

POLICY, PROMPT, HISTORY = "assistant", "prompt", "history"
"""Who wrote the tokens of a turn, where it was not the environment."""


@dataclass(slots=True)
class TurnRecord:
    """Tokens of a conversation that one side wrote. What the chat template writes around them belongs to given ones."""

    role: str
    """`assistant` for the policy. Otherwise what the messages are: `user`, or `tool` and its name. `prompt` is what the
    prompts of a group do not have in common, `history` what a branch begins with: the turns so far as they are now."""
    end: int
    reward: float | None = None
    """What the environment gave for a turn of the policy; None for the others."""


@dataclass(slots=True)
class ConversationRecord:
    """A conversation with an environment, and which piece of it a completion is."""

    piece: int
    """From 0. A later one is a branch: the chat template has rewritten the turns before it."""
    num_pieces: int
    """Pieces of the conversation. Its completions follow each other."""
    turns: list[TurnRecord] = field(default_factory=list)
    closing: list[tuple[str, str]] = field(default_factory=list)
    """Role and text of what the environment wrote after the last turn. The policy did not see it."""
    outcome: float | None = None
    num_calls: int = 0
    """Calls of tools in all pieces, failed ones included."""
    num_failed_calls: int = 0
    error: str = ""
    """How the environment failed, in words."""

    @classmethod
    def from_piece(cls, talk: Conversation, piece: int, drawn: Sequence[bool]) -> "ConversationRecord":
        """The record of one piece.

        `drawn` [T] tells of each recorded token whether the policy drew it; the piece may have more before them.
        """
        answers = answers_of(talk)
        at, turns = first_drawn(talk, piece), list[TurnRecord]()
        for own, run in groupby(range(len(drawn)), key=lambda t: drawn[t]):
            indices = [*run]
            if own:
                # Turns of the policy in a row are one run.
                for t in indices:
                    number = sum(end < at for end in talk.ends)
                    if talk.ends[number] == at or t == indices[-1]:
                        turns.append(TurnRecord(POLICY, t, talk.rewards[number]))
                    at += 1
            elif turns:
                number = sum(end < at for end in talk.ends)
                turns.append(TurnRecord(", ".join(dict.fromkeys(role for role, _ in answers[number - 1])), indices[-1]))
            else:
                turns.append(TurnRecord(HISTORY if piece else PROMPT, indices[-1]))
        closing = answers[-1] if answers and piece >= len(talk.pieces) - 1 else []
        calls = talk.num_calls, talk.num_failed_calls
        return cls(piece, len(talk.pieces), turns, closing, talk.outcome, *calls, talk.error)


def first_drawn(talk: Conversation, piece: int) -> int:
    """Index of a piece's first drawn token among all that the policy drew."""
    return sum(sum(before.drawn) for before in talk.pieces[:piece])


def answers_of(talk: Conversation) -> list[list[tuple[str, str]]]:
    """[turns] role and text of the messages that follow each turn of the policy."""
    found: list[list[tuple[str, str]]] = [[]]
    for message in reversed(talk.messages):
        if message["role"] == POLICY:
            found.append([])
        else:
            name = message.get("name") if message["role"] == "tool" else None
            found[-1].append((f"tool {name}" if name else message["role"], message["content"]))
    # The first messages may have turns of an assistant too, which are examples.
    return [answers[::-1] for answers in found[: len(talk.ends)]][::-1]
