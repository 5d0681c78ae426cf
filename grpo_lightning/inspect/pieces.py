"""The text of single tokens: together they are the decoded text, whatever the tokenizer."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of tokens as it is, special tokens by their names."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """[T] the text that each token adds; joined they are `decode(tokenizer, token_ids)`.

    A token that ends inside a character adds nothing; the one that ends the character adds the whole.
    """
    pieces: list[str] = []
    # Each token is decoded after the few before it, since a decoder may treat the first one specially.
    first = known = 0
    for end in range(1, len(token_ids) + 1):
        before, text = decode(tokenizer, token_ids[first:known]), decode(tokenizer, token_ids[first:end])
        if end < len(token_ids) and (text.endswith(BROKEN) or not text.startswith(before)):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        first, known = known, end
    whole = decode(tokenizer, token_ids)
    return pieces if "".join(pieces) == whole else _prefixes(tokenizer, token_ids, whole)


def _prefixes(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], whole: str) -> list[str]:
    """As `pieces_of`, for a tokenizer whose text of a token depends on all tokens before it."""
    ends = [0]
    for end in range(1, len(token_ids)):
        text = decode(tokenizer, token_ids[:end])
        agree = next(
            (i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), min(map(len, (text, whole)))
        )
        ends.append(max(ends[-1], agree))
    ends.append(len(whole))
    return [whole[start:end] for start, end in pairwise(ends)] if token_ids else []


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
