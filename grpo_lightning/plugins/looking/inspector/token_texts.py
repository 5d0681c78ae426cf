"""The text of single tokens: together they are the decoded text, whatever the tokenizer."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from grpo_lightning.types import BROKEN

MAX_OPEN = 16
"""Tokens that may wait for the end of a character. A character has at most four bytes; more tokens are broken bytes."""


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Returns the text of tokens as it is, special tokens by their names."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """[T] the text that each token adds; joined they are `decode(tokenizer, token_ids)`.

    A token that ends inside a character adds nothing; the token that ends the character adds the whole. In long runs of
    broken bytes, the last token adds the text of those before it too.
    """
    pieces: list[str] = []
    # Each token is decoded after the few before it, since a decoder may treat the first token specially.
    # The text of tokens before `done` is in `pieces`; decoding starts at `start`, a little earlier.
    start = done = 0
    for end in range(1, len(token_ids) + 1):
        text_done = decode(tokenizer, token_ids[start:done])
        text = decode(tokenizer, token_ids[start:end])
        is_open = text.endswith(BROKEN) or not text.startswith(text_done)
        if is_open and end < len(token_ids) and end - done < MAX_OPEN:
            pieces.append("")
            continue
        pieces.append(text[len(text_done) :])
        start, done = done, end
    full_text = decode(tokenizer, token_ids)
    return pieces if "".join(pieces) == full_text else _fitted(pieces, full_text)


def _fitted(pieces: Sequence[str], full_text: str) -> list[str]:
    """Returns pieces that join to `full_text`, for a tokenizer whose text of a token depends on all tokens before it.

    Pieces at the beginning and at the end that fit `full_text` stay; the last token between takes the rest of the text.
    """
    # Pieces before `head` and from `tail` on fit; the text between `start` and `stop` is left.
    head = start = 0
    while head < len(pieces) - 1 and full_text.startswith(pieces[head], start):
        start += len(pieces[head])
        head += 1
    tail = len(pieces)
    stop = len(full_text)
    while tail > head + 1 and stop - len(pieces[tail - 1]) >= start and full_text.endswith(pieces[tail - 1], 0, stop):
        tail -= 1
        stop -= len(pieces[tail])
    return [*pieces[:head], *[""] * (tail - head - 1), full_text[start:stop], *pieces[tail:]]


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> dict[int, str]:
    """Returns the text of each token by itself, with its leading space; bytes inside a character as `<F0 9F>`."""
    # A plain token, after which a decoder keeps the leading space of the next.
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
    anchor_text = decode(tokenizer, anchor)
    vocabulary = {}
    for id in sorted({*token_ids}):
        text = decode(tokenizer, [*anchor, id])
        text = text[len(anchor_text) :] if text.startswith(anchor_text) else decode(tokenizer, [id])
        vocabulary[id] = _spelt_out(tokenizer, id) if BROKEN in text or not text else text
    return vocabulary


def _spelt_out(tokenizer: PreTrainedTokenizerBase, id: int) -> str:
    """Returns the bytes of a token that is no text by itself, or else its entry in the vocabulary."""
    entry = tokenizer.convert_ids_to_tokens(id)
    if not isinstance(entry, str):
        return f"<{id}>"
    byte_of_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
    if not {*entry} <= byte_of_letter.keys():
        return entry
    return f"<{bytes(byte_of_letter[letter] for letter in entry).hex(' ').upper()}>"
