"""The text of single tokens: together they are the decoded text, whatever the tokenizer."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from grpo_lightning.types import BROKEN

MOST_OPEN = 16
"""Tokens that may wait for the end of a character. One has at most four bytes; more are broken."""
MOST_LOOKS = 64
"""How often all tokens up to one of them are decoded, where a few before it do not tell its text."""


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of tokens as it is, special tokens by their names."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """[T] the text that each token adds; joined they are `decode(tokenizer, token_ids)`.

    A token that ends inside a character adds nothing; the one that ends the character adds the whole. In long runs of
    broken bytes, some tokens add the text of those before them too.
    """
    pieces: list[str] = []
    # Each token is decoded after the few before it, since a decoder may treat the first one specially.
    first = known = 0
    for end in range(1, len(token_ids) + 1):
        before, text = decode(tokenizer, token_ids[first:known]), decode(tokenizer, token_ids[first:end])
        is_open = text.endswith(BROKEN) or not text.startswith(before)
        if is_open and end < len(token_ids) and end - known < MOST_OPEN:
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        first, known = known, end
    whole = decode(tokenizer, token_ids)
    return pieces if "".join(pieces) == whole else _fitted(tokenizer, token_ids, pieces, whole)


def _fitted(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], pieces: Sequence[str], whole: str
) -> list[str]:
    """Other pieces that give `whole` together, for a tokenizer whose text of a token depends on all before it.

    Those at the beginning and at the end that fit `whole` stay.
    """
    head, start = 0, 0
    while head < len(pieces) - 1 and whole.startswith(pieces[head], start):
        start += len(pieces[head])
        head += 1
    tail, stop = len(pieces), len(whole)
    while tail > head + 1 and stop - len(pieces[tail - 1]) >= start and whole.endswith(pieces[tail - 1], 0, stop):
        stop -= len(pieces[tail - 1])
        tail -= 1
    stride = -(-(tail - head) // MOST_LOOKS)
    ends = [start]
    for index in range(head, tail - 1):
        end = _agreeing(decode(tokenizer, token_ids[: index + 1]), whole) if (index - head + 1) % stride == 0 else 0
        ends.append(min(max(ends[-1], end), stop))
    ends.append(stop)
    return [*pieces[:head], *(whole[a:b] for a, b in pairwise(ends)), *pieces[tail:]]


def _agreeing(text: str, whole: str) -> int:
    """The number of characters at the beginning that both have."""
    shorter = min(len(text), len(whole))
    return next((i for i in range(shorter) if text[i] != whole[i]), shorter)


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> dict[int, str]:
    """The text of each of these tokens by itself, with its leading space; bytes inside a character as `<F0 9F>`."""
    anchor = _anchor(tokenizer)
    before = decode(tokenizer, anchor)
    found = {}
    for id in sorted({*token_ids}):
        text = decode(tokenizer, [*anchor, id])
        text = text[len(before) :] if text.startswith(before) else decode(tokenizer, [id])
        found[id] = _spelt_out(tokenizer, id) if BROKEN in text or not text else text
    return found


def _anchor(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A plain token, after which a decoder keeps the leading space of the next."""
    ids = tokenizer.encode("a", add_special_tokens=False)
    return ids[-1:] if ids and decode(tokenizer, ids[-1:]).endswith("a") else []


def _spelt_out(tokenizer: PreTrainedTokenizerBase, id: int) -> str:
    """A token that is no text by itself: its bytes, or else its entry in the vocabulary."""
    entry = tokenizer.convert_ids_to_tokens(id)
    if not isinstance(entry, str):
        return f"<{id}>"
    known = byte_of_letter()
    if not all(letter in known for letter in entry):
        return entry
    return f"<{bytes(known[letter] for letter in entry).hex(' ').upper()}>"


@cache
def byte_of_letter() -> dict[str, int]:
    """The byte behind each letter of a byte-level vocabulary: printable ones stand for themselves (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}
