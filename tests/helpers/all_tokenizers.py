"""Tokenizers of all kinds with 64 tokens, ids 0 to 5 as in `tiny`: what a token spells depends on its neighbours."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from helpers.tiny import SPECIAL, VOCABULARY, tokenizer, with_special

LETTERS = "aab<>/ .'é\n€😀"
"""Few, so that strings come again and overlap; of one to four bytes."""


def of(tokens: Sequence[str], decoder: Any, **kwargs: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of `tiny`, then `tokens`, filled up to 64."""
    names = [*SPECIAL, *dict.fromkeys(tokens)][:VOCABULARY]
    names += [f"z{index}" for index in range(VOCABULARY - len(names))]
    backend = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    return with_special(backend, **kwargs)


def trained(texts: Sequence[str], vocab_size: int, *special: str, use_regex: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that has learned merges, also across characters' borders; the first special token ends."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "special_tokens": list(special), "show_progress": False}
    backend.train_from_iterator(texts, BpeTrainer(vocab_size=vocab_size, **options))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0], pad_token=special[-1])


def words(rng: random.Random, count: int) -> list[str]:
    """Random words of one to three letters."""
    return ["".join(rng.choices(LETTERS, k=rng.randint(1, 3))) for _ in range(count)]


def byte_level(rng: random.Random) -> PreTrainedTokenizerFast:
    """As GPT-2's: tokens are any bytes, so that they split characters, or have the end of one and the next."""
    character_of_byte = bytes_to_unicode()
    tokens = []
    while len(set(tokens)) < VOCABULARY - len(SPECIAL):
        text = "".join(rng.choices(LETTERS, k=3)).encode()
        start = rng.randrange(len(text))
        tokens.append("".join(character_of_byte[byte] for byte in text[start : start + rng.randint(1, 4)]))
    return of(tokens, decoders.ByteLevel())


def byte_fallback(rng: random.Random) -> PreTrainedTokenizerFast:
    """As Llama 2's: `▁` is a space, the first of the text is left out, and rare characters are tokens of a byte."""
    raw = [f"<0x{byte:02X}>" for byte in sorted({*"é\n€😀".encode()})]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return of(["▁", *raw, *(word.replace(" ", "▁") for word in words(rng, 90))], decoders.Sequence(steps))


def metaspace(rng: random.Random) -> PreTrainedTokenizerFast:
    """As T5's: `▁` is a space, but for the first of the text."""
    return of(["▁", *(word.replace(" ", "▁") for word in words(rng, 120))], decoders.Metaspace())


def word_piece(rng: random.Random) -> PreTrainedTokenizerFast:
    """As BERT's: a space before every token without `##`."""
    pieces = [rng.choice(["", "##"]) + word.strip() for word in words(rng, 200)]
    return of([piece for piece in pieces if piece], decoders.WordPiece(cleanup=rng.random() < 0.5))


def suffixes(rng: random.Random) -> PreTrainedTokenizerFast:
    """As OpenAI's first GPT: a space after every token with `</w>`, unless it is the last."""
    return of([word.strip() + rng.choice(["", "</w>"]) for word in words(rng, 200)], decoders.BPEDecoder("</w>"))


def spaced(rng: random.Random) -> PreTrainedTokenizerFast:
    """Without a decoder: a space between tokens."""
    return of(words(rng, 120), None)


def tidied(rng: random.Random) -> PreTrainedTokenizerFast:
    """transformers takes spaces out of the text afterwards: ` .`, ` '`."""
    return of([*" .'ab", " n't", *words(rng, 120)], decoders.Fuse(), clean_up_tokenization_spaces=True)


def characters(rng: random.Random) -> PreTrainedTokenizerFast:
    """The one of `tiny`."""
    return tokenizer()


STABLE: dict[str, Callable[[random.Random], PreTrainedTokenizerFast]] = {
    one.__name__: one for one in (byte_level, metaspace, word_piece, suffixes, spaced, characters)
}
"""What a token more adds to a text never changes what was there, but for U+FFFD."""

ALL = STABLE | {one.__name__: one for one in (byte_fallback, tidied)}
