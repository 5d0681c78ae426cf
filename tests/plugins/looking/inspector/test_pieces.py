"""The text of single tokens, for byte-level, SentencePiece-like and other tokenizers."""

import random
from collections.abc import Callable

import pytest
from helpers import tiny
from helpers.all_tokenizers import trained
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from grpo_lightning.plugins.looking.inspector.token_texts import decode, pieces_of, vocabulary_of

TEXTS = [
    "Hello world, 12 + 34 = 46.",
    "  two spaces,\n\na line\tand a tab ",
    "日本語の文章と한국어",
    "🙂👩‍👩‍👧 é e\u0301 مرحبا",
    "<script>alert(1)</script>\x00\x07",
    "",
]
WORDS = ["Hello world", "12 + 34 = 46", "a line and a tab"]


def byte_level() -> PreTrainedTokenizerBase:
    """As GPT-2, Llama 3 and Qwen: every byte is a token, some pairs are merged, also across characters' borders."""
    return trained(TEXTS[:4], 300, "<|end|>")


def sentence_piece() -> PreTrainedTokenizerBase:
    """As Llama 2: a space is part of the next word, the first is dropped, unknown characters fall back to bytes."""
    letters = sorted({letter for word in WORDS for letter in word.replace(" ", "▁")})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    vocabulary = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    merges = []
    for pair in (("▁", "w"), ("▁", "1"), ("l", "l"), ("▁", "H")):
        vocabulary.setdefault("".join(pair), len(vocabulary))
        merges.append(pair)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": byte_level,
    "sentence piece": sentence_piece,
    "characters": tiny.tokenizer,
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_in_any_order(kind: str) -> None:
    tokenizer = KINDS[kind]()
    rng = random.Random(0)
    for length in (1, 2, 7, 60):
        for _ in range(20):
            ids = [rng.randrange(len(tokenizer)) for _ in range(length)]
            assert "".join(pieces_of(tokenizer, ids)) == decode(tokenizer, ids)
    assert pieces_of(tokenizer, []) == []


def test_a_character_of_several_tokens_is_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("x🦖y", add_special_tokens=False)
    assert len(ids) == 5  # four bytes, of which the first two are one token
    assert pieces_of(tokenizer, ids) == ["x", "", "", "🦖", "y"]
    # Cut off inside the character: what a decoder writes for it.
    assert pieces_of(tokenizer, ids[:3]) == ["x", "", "\ufffd"]


def test_leading_spaces_are_kept() -> None:
    tokenizer = sentence_piece()
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁H", "e", "ll", "o", "▁w", "o", "r", "l", "d"]
    assert pieces_of(tokenizer, ids) == ["H", "e", "ll", "o", " w", "o", "r", "l", "d"]
    assert vocabulary_of(tokenizer, ids)[ids[4]] == " w"


def test_alternatives_by_themselves() -> None:
    tokenizer = byte_level()
    first = tokenizer.encode("🦖", add_special_tokens=False)[0]
    end = tokenizer.eos_token_id
    assert vocabulary_of(tokenizer, [first, end, first]) == {first: "<F0 9F>", end: "<|end|>"}
    space = tokenizer.encode(" a", add_special_tokens=False)[0]
    assert vocabulary_of(tokenizer, [space])[space].startswith(" ")


def broken_bytes(tokenizer: PreTrainedTokenizerBase, *bytes_: int) -> list[int]:
    """The tokens of single bytes, byte-level or `<0xE6>`."""
    letters = bytes_to_unicode()
    ids = [tokenizer.get_vocab().get(letters[byte], tokenizer.get_vocab().get(f"<0x{byte:02X}>")) for byte in bytes_]
    assert None not in ids
    return ids


RUNS = {"leading": [0xE6], "following": [0x97], "cut": [0xF0, 0x9F], "mixed": [0x41, 0xE6, 0xA5, 0x41, 0xFF]}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["byte-level", "sentence piece"])
def test_long_runs_of_broken_bytes(kind: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS[kind]()
    text = tokenizer.encode("Hello world", add_special_tokens=False)
    ids = [*text, *broken_bytes(tokenizer, *RUNS[run] * (2000 // len(RUNS[run]))), *text]
    whole = decode(tokenizer, ids)
    expected = pieces_of(tokenizer, text)
    decoded = count_decoded(tokenizer, monkeypatch)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == whole and len(pieces) == len(ids)
    assert pieces[: len(text)] == expected
    assert pieces[-5:] == expected[-5:]
    assert sum(decoded) < 150 * len(ids)


def count_decoded(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that are decoded from now on."""
    decoded: list[int] = []
    original = type(tokenizer).decode

    def counting(self: PreTrainedTokenizerBase, token_ids: list[int], **options: bool) -> str:
        decoded.append(len(token_ids))
        return str(original(self, token_ids, **options))

    monkeypatch.setattr(type(tokenizer), "decode", counting)
    return decoded
