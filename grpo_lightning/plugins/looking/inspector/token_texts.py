"""The text of single tokens: together they are the decoded text, whatever the tokenizer."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from grpo_lightning.types import BROKEN

MOST_OPEN = 16  # tokens that may wait for the end of a character. One has at most four bytes; more are broken.


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of tokens as it is, special tokens by their names."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """[T] the text that each token adds; joined they are `decode(tokenizer, token_ids)`.

    A token that ends inside a character adds nothing; the one that ends the character adds the whole. In long runs of
    broken bytes, the last token adds the text of those before it too.
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
    return pieces if "".join(pieces) == whole else _fitted(pieces, whole)


def _fitted(pieces: Sequence[str], whole: str) -> list[str]:
    """Other pieces that give `whole` together, for a tokenizer whose text of a token depends on all before it.

    Those at the beginning and at the end that fit `whole` stay; the last of the tokens between takes all of their text.
    """
    head, tail, start, stop = 0, len(pieces), 0, len(whole)
    while head < len(pieces) - 1 and whole.startswith(pieces[head], start):
        start, head = start + len(pieces[head]), head + 1
    while tail > head + 1 and stop - len(pieces[tail - 1]) >= start and whole.endswith(pieces[tail - 1], 0, stop):
        stop, tail = stop - len(pieces[tail - 1]), tail - 1
    return [*pieces[:head], *[""] * (tail - head - 1), whole[start:stop], *pieces[tail:]]


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> dict[int, str]:
    """The text of each of these tokens by itself, with its leading space; bytes inside a character as `<F0 9F>`."""
    # A plain token, after which a decoder keeps the leading space of the next.
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
    before = decode(tokenizer, anchor)
    found = {}
    for id in sorted({*token_ids}):
        text = decode(tokenizer, [*anchor, id])
        text = text[len(before) :] if text.startswith(before) else decode(tokenizer, [id])
        found[id] = _spelt_out(tokenizer, id) if BROKEN in text or not text else text
    return found


def _spelt_out(tokenizer: PreTrainedTokenizerBase, id: int) -> str:
    """A token that is no text by itself: its bytes, or else its entry in the vocabulary."""
    entry = tokenizer.convert_ids_to_tokens(id)
    if not isinstance(entry, str):
        return f"<{id}>"
    known = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return f"<{bytes(known[letter] for letter in entry).hex(' ').upper()}>" if {*entry} <= known.keys() else entry
