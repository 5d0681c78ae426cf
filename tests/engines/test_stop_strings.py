"""Stop strings: found in the text, whatever tokens spell it, and by every engine alike."""

import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
from helpers import drawing
from helpers.all_tokenizers import ALL, of
from helpers.contracts import needs
from helpers.tiny import STOP_IDS, model_of, policy_of, prompts_of, requests_of

from grpo_lightning import PlainEngine, Policy, RolloutEngine, Sampling, StopStrings
from grpo_lightning.command.overview import optional
from grpo_lightning.engines.stop_strings import text_of
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, UsageError

ScriptedEngine: Any = optional("ScriptedEngine")
TRIALS = 15


@cache
def policy(kind: str, seed: int = 0) -> Policy:
    """A policy with a tokenizer of a kind; it draws the special tokens too, and no token twice as often as others."""
    return Policy.from_model(model_of("llama", scale=0.05), ALL[kind](random.Random(seed)))


def text(kind: str, seed: int, ids: Sequence[int]) -> str:
    return policy(kind, seed).tokenizer.decode(list(ids), skip_special_tokens=True)


def strings_in(rng: random.Random, whole: str) -> list[str]:
    """One to three strings, most of them somewhere in the text."""
    pieces = [piece for piece in whole.split("\ufffd") if piece] or ["ab"]
    found = []
    for _ in range(rng.randint(1, 3)):
        piece = rng.choice(pieces)
        first = rng.randrange(len(piece))
        found.append(piece[first : first + rng.choice([1, 2, 3, 5, 9, 20])] + rng.choice(["", "", "", "a"]))
    return found


def first_end(text: str, strings: Sequence[str]) -> int | None:
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return min(ends, default=None)


def completed(kind: str, seed: int, ids: Sequence[int], strings: Sequence[str]) -> int | None:
    """By definition: the first number of tokens whose text contains a stop string."""
    for end in range(1, len(ids) + 1):
        if first_end(text(kind, seed, ids[:end]), strings) is not None:
            return end
    return None


def cases(kind: str, longest: int = 40) -> Any:
    """A seed of the tokenizer, token ids and stop strings; many of the ids are special tokens, which have no text."""
    for trial in range(TRIALS):
        seed, rng = trial % 5, random.Random(f"{kind} {trial}")
        ordinary = [id for id in range(64) if id not in STOP_IDS]
        ids = [
            rng.choice([rng.choice(ordinary), rng.choice([0, 1, 2, 4]), rng.choice(ordinary)]) for _ in range(longest)
        ]
        yield seed, ids, strings_in(rng, text(kind, seed, ids))


@pytest.mark.parametrize("kind", ALL)
def test_a_completion_ends_with_the_token_that_completes_a_string(kind: str) -> None:
    ended = 0
    for seed, ids, strings in cases(kind, longest=150):
        stops = StopStrings(policy(kind, seed), strings)
        expected = completed(kind, seed, ids, strings)
        logp = [-float(token) for token in ids]
        cut = stops.cut(Completion(ids, logp, FinishReason.LENGTH))
        assert cut.token_ids == ids[:expected], (strings, text(kind, seed, ids))
        assert cut.logp == logp[:expected]
        assert cut.finish_reason is (FinishReason.LENGTH if expected is None else FinishReason.STOP)
        assert bool(cut.stop_string) is (expected is not None)
        assert stops.cut(cut) is cut
        # What rewards see of it ends with the string that ends first, though its last token may not.
        seen, written = text_of(cut, policy(kind, seed).tokenizer), text(kind, seed, cut.written)
        assert seen == written[: first_end(written, strings)]
        assert seen.endswith(cut.stop_string)
        ended += expected is not None
    assert ended > TRIALS / 2


def checked_every(stops: StopStrings, ids: list[int], interval: int) -> int | None:
    """The end that repeated checks find."""
    ends = (stops.first_end(ids[: start + interval], start) for start in range(0, len(ids), interval))
    return next(filter(None, ends), None)


@pytest.mark.parametrize("interval", [1, 3, 8])
@pytest.mark.parametrize("kind", ALL)
def test_repeated_checks_find_the_same_end(kind: str, interval: int) -> None:
    for seed, ids, strings in cases(kind):
        stops = StopStrings(policy(kind, seed), strings)
        assert checked_every(stops, ids, interval) == completed(kind, seed, ids, strings)


def test_a_string_may_end_anywhere_in_a_token() -> None:
    own = policy_of()

    def ids(written: str) -> list[int]:
        return own.tokenizer.encode(written, add_special_tokens=False)

    def cut(written: str, *strings: str) -> tuple[int, str]:
        completion = StopStrings(own, strings).cut(Completion(ids(written), None, FinishReason.LENGTH))
        return len(completion.token_ids), completion.stop_string

    assert cut("abcdef", "cd") == (4, "cd")
    assert cut("abcdef", "e", "cd", "abc") == (3, "abc")
    assert cut("aabaaab", "aaab") == (7, "aaab")
    assert cut("ababac", "abac") == (6, "abac")
    assert cut("abcdef", "cdx") == (6, "")
    # Of two that end together the first is named.
    assert cut("abcd", "bc", "c") == (3, "bc")
    # Of two that one token completes it is the one that ends first, not the one that begins first.
    assert StopStrings(own, ["abcd", "bc"]).find("abcd") == "bc"


EMOJI = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
"""A character of four tokens. Bytes are decoded a run at a time: one that is broken breaks the run."""

RARE: dict[str, tuple[str, list[str], str, int | None]] = {
    "gone with the next token, for good": ("byte_fallback", ["<0x0A>", "<0xF0>", "a", "a"], "\n", 1),
    "gone with the next token, and back": ("byte_fallback", ["<0x0A>", *EMOJI, "a"], "\n", 1),
    "after a long run of bytes": ("byte_fallback", [*EMOJI * 30, "<0x0A>", "a"], "\n", 121),
    "in a run that was broken before": ("byte_fallback", ["<0x9F>", *EMOJI * 30, "<0x0A>"], "\n", None),
    "with tokens without text in between": ("spaced", ["a", *["<pad>"] * 200, "b", "<bos>", "a"], "a b", 202),
    "tidied away by the next token": ("tidied", ["a", " '", "<pad>", " b"], "a '", 2),
    "only where the text begins": ("word_piece", [*["a"] * 50, "##b"], "##b", None),
}
"""A kind of tokenizer, tokens, a stop string, and the number of tokens that complete it."""


@pytest.mark.parametrize("interval", [1, 3, 64, 999])
@pytest.mark.parametrize("case", RARE)
def test_stop_strings_in_rare_texts(case: str, interval: int) -> None:
    kind, tokens, string, expected = RARE[case]
    decoder = ALL[kind](random.Random(0)).backend_tokenizer.decoder
    own = Policy.from_model(model_of("llama"), of([*tokens], decoder, clean_up_tokenization_spaces=kind == "tidied"))
    ids = own.tokenizer.convert_tokens_to_ids(tokens)
    texts = [own.tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(1, len(ids) + 1)]
    assert next((end for end, text in enumerate(texts, start=1) if string in text), None) == expected
    stops = StopStrings(own, [string])
    assert checked_every(stops, ids, interval) == expected
    assert len(stops.cut(Completion(ids, None, FinishReason.LENGTH)).token_ids) == (expected or len(ids))


@needs(ScriptedEngine)
def test_the_prompt_does_not_count() -> None:
    prompt = prompts_of([4])[0]
    script = f"{prompt.text[:1]}b"
    (completion,) = drawn(ScriptedEngine(lambda request, text: script), policy_of(), [prompt.text[-2:] + script[:1]])
    assert completion.token_ids[-1] in STOP_IDS


def drawn(
    engine: RolloutEngine, own: Policy, strings: Sequence[str] = (), lengths: Sequence[int] = (4,), group_size: int = 1,
    **sampling: Any,
) -> list[Completion]:  # fmt: skip
    engine.sync(own)
    settings = {"max_new_tokens": 40} | sampling
    return engine.complete(requests_of(lengths, group_size), Sampling(**settings, stop=list(strings)), RandomKey())


def spoken(own: Policy, completion: Completion) -> str:
    return own.tokenizer.decode(completion.written, skip_special_tokens=True)


def random_characters(request: Request, text: str) -> str:
    return "".join(random.Random(request.sample).choices("abcd", k=30))


ENGINES: dict[str, Any] = {
    "plain": lambda: PlainEngine(max_rows=3),
}
if ScriptedEngine:
    ENGINES["scripted"] = partial(ScriptedEngine, random_characters)
if native := drawing.ENGINES.get("native"):
    ENGINES["native"] = native
    ENGINES["native, one look"] = partial(native, check_every=64)
    ENGINES["native, looks always"] = partial(native, check_every=1, max_rows=3)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_draws_the_beginning_of_the_unstopped_completion(engine: str) -> None:
    kind = "characters" if engine == "scripted" else "byte_fallback"
    own, rng, ended, early = policy(kind), random.Random(kind), 0, 0
    lengths, group_size = [4, 1, 7], 4
    whole = drawn(ENGINES[engine](), own, lengths=lengths, group_size=group_size)
    for _ in range(2):
        strings = strings_in(rng, spoken(own, rng.choice(whole))) + strings_in(rng, spoken(own, rng.choice(whole)))
        for long, short in zip(whole, drawn(ENGINES[engine](), own, strings, lengths, group_size), strict=True):
            expected = completed(kind, 0, long.written, strings)
            assert short.token_ids == long.token_ids[:expected]
            assert short.finish_reason is (long.finish_reason if expected is None else FinishReason.STOP)
            assert bool(short.stop_string) is (expected is not None)
            if long.logp is not None:
                exact = engine == "native, one look"  # Else other rows are decoded together.
                assert short.logp == (long.logp[:expected] if exact else pytest.approx(long.logp[:expected], abs=1e-5))
            ended += expected is not None
            early += expected is not None and expected < len(long.token_ids) - 1
    assert ended > 6 and early > 3


@pytest.mark.parametrize("engine", drawing.ENGINES.values())
def test_rows_that_found_their_string_are_decoded_no_further(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = policy_of(scale=0.05)
    rows: list[int] = []
    logits = Policy.logits
    monkeypatch.setattr(Policy, "logits", lambda self, hidden: rows.append(len(hidden)) or logits(self, hidden))
    forward = own.model.forward
    monkeypatch.setattr(own.model, "forward", lambda *args, **kwargs: rows.append(1) or forward(*args, **kwargs))
    letters = [chr(letter) for letter in range(ord("a"), ord("z"))]
    short = drawn(engine(), own, letters, group_size=8, max_new_tokens=100)
    assert max(len(one.token_ids) for one in short) <= 8
    assert len(rows) <= 1 + 8


@pytest.mark.parametrize("engine", [name for name in ENGINES if "," not in name])
def test_a_special_token_may_end_completions_as_a_stop_token_does(engine: str) -> None:
    own = policy_of(scale=0.05)
    whole = drawn(ENGINES[engine](), own, group_size=12)
    short = drawn(ENGINES[engine](), own, ["<sep>"], group_size=12)
    for long, one in zip(whole, short, strict=True):
        end = next((index + 1 for index, token in enumerate(long.token_ids) if token == 4), None)
        assert one.token_ids == long.token_ids[:end]
        assert one.stop_string == ""
        if end:
            assert one.finish_reason is FinishReason.STOP and one.written == long.token_ids[: end - 1]
    assert engine == "scripted" or any(one.token_ids[-1] == 4 for one in short)


def test_a_stop_token_that_is_text_is_not_searched() -> None:
    """`4` ends completions as a stop token; the stop string can only be there before."""
    own = policy_of(eos_token_id=[10, 3, 5])
    assert own.tokenizer.decode([10]) == "4"
    whole, found = (drawn(PlainEngine(), own, strings, group_size=16) for strings in ([], ["4"]))
    assert any(one.token_ids[-1] == 10 and len(one.token_ids) > 1 for one in whole)
    assert [one.token_ids for one in found] == [one.token_ids for one in whole]


def test_a_string_with_a_special_token_in_it_is_refused() -> None:
    with pytest.raises(UsageError, match=r"sampling.stop: '<sep>a' contains the special token '<sep>'.*alone"):
        StopStrings(policy_of(), ["<sep>a"])


def test_long_completions_take_linear_time() -> None:
    """Each token is decoded a few times, whatever the length."""
    own = policy("byte_level")
    decoded: list[int] = []
    stops = StopStrings(own, ["</answer>", "#" * 12])
    decode = stops._decode
    stops._decode = lambda ids: decoded.append(len(ids)) or decode(ids)  # type: ignore[method-assign]
    letters = [id for id in range(6, 64) if "\ufffd" not in own.tokenizer.decode([id])]
    ids = random.Random(0).choices(letters, k=2000)
    for seen in range(0, 2000, 8):
        assert stops.first_end(ids[: seen + 8], seen) is None
    assert sum(decoded) < 12 * 2000
    decoded.clear()
    whole = Completion(ids, None, FinishReason.LENGTH)
    assert stops.cut(whole) is whole
    assert sum(decoded) < 2 * 2000
