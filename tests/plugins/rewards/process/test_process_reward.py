"""ProcessReward: where segments end, which token that is, what they are worth."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.all_tokenizers import trained
from helpers.tiny import tokenizer as character_tokenizer
from transformers import PreTrainedTokenizerFast

from grpo_lightning import (
    ByLine,
    ByPattern,
    Reward,
    RewardResult,
    Run,
    Segment,
    SegmentScorer,
    Splitter,
)
from grpo_lightning.plugins.rewards.process.process_reward import ProcessReward, last_tokens
from grpo_lightning.sandbox.pool import Outcome
from grpo_lightning.types import FinishReason, Prompt, Question, Sample


class Lengths(SegmentScorer):
    """A segment is worth its number of characters."""

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        assert ["".join(own) for own in segments] == [sample.text for sample in samples]
        return [[float(len(segment)) for segment in own] for own in segments]


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    """Tokens are runs of bytes: parts of a character, or several of them."""
    return trained(["ab.\n\ncd.\n\nab é\nab.\n\ncd. €" * 5], 330, "<eos>", "<pad>", use_regex=False)


def reward_of(bpe: PreTrainedTokenizerFast, *args: Any, **options: Any) -> ProcessReward:
    """The reward of a run with this tokenizer."""
    reward = ProcessReward(Lengths(), *args, **options)
    reward.setup(Run(torch.device("cpu"), bpe, 8))
    return reward


def sample(text: str, token_ids: list[int], truncated: bool = False) -> Sample:
    """A completion; unless it is truncated, its last token is the stop token."""
    reason = FinishReason.LENGTH if truncated else FinishReason.STOP
    return Sample(Prompt(0, "q", [1], Question("q", "1")), text, token_ids, reason)


def ended(bpe: PreTrainedTokenizerFast, text: str) -> Sample:
    """A completion that has ended by itself."""
    return sample(text, [*bpe.encode(text), 0])


def segments_of(splitter: Splitter, text: str) -> list[str]:
    (outcome,) = splitter([text])
    return [text[start:end] for start, end in zip([0, *outcome.value], outcome.value, strict=False)]


# Splitters


@pytest.mark.parametrize(
    ("splitter", "text", "expected"),
    [
        (ByLine(), "a\nb\n", ["a\n", "b\n"]),
        (ByLine(), "a\n\n\nb", ["a\n\n\n", "b"]),
        (ByLine(), "\n a\nb", ["\n a\n", "b"]),
        (ByLine(), "a\r\n  \nb", ["a\r\n  \n", "b"]),
        (ByLine(), "", [""]),
        (ByLine(), "\n\n", ["\n\n"]),
        (ByPattern("</step>"), "<step>a</step>\n<step>b</step> c", ["<step>a</step>", "\n<step>b</step>", " c"]),
        (ByPattern("</step>"), "<step>a</step>\n", ["<step>a</step>\n"]),
        (ByPattern("</x>|</y>"), "<x>a</x><y>b</y><step>c</step>", ["<x>a</x>", "<y>b</y>", "<step>c</step>"]),
        (ByPattern(r"\n\n"), "a\nb\n\nc", ["a\nb\n\n", "c"]),
        (ByPattern(r"(?=Step \d)"), "Step 1 a Step 2 b", ["Step 1 a ", "Step 2 b"]),
        (ByPattern(r"[.;]\s"), "a; b. c.", ["a; ", "b. ", "c."]),
        (ByPattern(r""), "abc", ["a", "b", "c"]),
    ],
)
def test_texts_are_cut_into_segments(splitter: Splitter, text: str, expected: list[str]):
    assert segments_of(splitter, text) == expected
    splitter.close()


class Unsorted(Splitter):
    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        return [Outcome("ok", [3, 1, 3, 0]) for _ in texts]


def test_cuts_may_come_in_any_order_and_twice():
    assert segments_of(Unsorted(), "abcd") == ["a", "bc", "d"]


def test_a_text_that_cannot_be_split_costs_its_sample(bpe: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch):
    splitter = ByPattern("(a+)+b")
    found = [*splitter(["aab c"]), Outcome("timeout")]
    monkeypatch.setattr(ByPattern, "__call__", lambda self, texts: found)
    reward = reward_of(bpe, splitter)
    result = reward([ended(bpe, text) for text in ("aab c", "a" * 60)])
    assert result.status == ["ok", "timeout"]
    assert result.value[0] == 2
    assert math.isnan(result.value[1])
    assert result.segments is not None
    assert [segment.value for segment in result.segments[0]] == [3.0, 2.0]
    assert result.segments[1] == []
    reward.close()


# Which token


def test_the_last_token_of_a_step_by_hand():
    one_by_one = character_tokenizer()
    assert last_tokens(one_by_one, one_by_one.encode("ab1cd"), "ab1cd", [2, 3, 5]) == [1, 2, 4]
    # Ids 4 and 2 are special: they decode to nothing, and a segment ends before them.
    ids = [10, 11, 4, 12, 2, 13]
    assert last_tokens(one_by_one, ids, one_by_one.decode([10, 11, 12, 13]), [2, 3]) == [1, 3]


def test_the_last_token_of_a_step_by_counting_bytes(bpe: PreTrainedTokenizerFast):
    """Of a byte-level tokenizer, a token's bytes are known: count them."""
    rng = random.Random(0)
    size_of = {token: len(text) for text, token in bpe.get_vocab().items()}
    longest = 0
    for _ in range(50):
        text = "".join(rng.choice(["ab", ".\n\n", "cd", " ", "é", "€", "🙂", "x"]) for _ in range(rng.randrange(1, 30)))
        ids = bpe.encode(text)
        ends = sorted({rng.randrange(1, len(text) + 1) for _ in range(6)})
        expected = []
        for end in ends:
            left = len(text[:end].encode())
            token = -1
            while left > 0:
                token += 1
                left -= size_of[ids[token]]
            expected.append(token)
        assert last_tokens(bpe, ids, text, ends) == expected
        longest = max([longest, *(size_of[token] for token in ids)])
    assert longest >= 3


def test_a_wrong_tokenizer_is_named(bpe: PreTrainedTokenizerFast):
    assert last_tokens(character_tokenizer(), [], "", []) == []
    with pytest.raises(ValueError, match="the policy's own"):
        last_tokens(character_tokenizer(), [10, 11], "xy", [1])
    reward = reward_of(bpe)
    assert reward([sample("a\nb", [5, 6, 7])]).status == ["error"]


# The reward


def test_segments_end_at_their_last_tokens_and_the_last_at_the_stop_token(bpe: PreTrainedTokenizerFast):
    reward = reward_of(bpe, reduce="sum")
    ids = bpe.encode("x\nyy\nz")
    assert len(ids) == 6
    result = reward([ended(bpe, "x\nyy\nz"), sample("x\nyy\nz", ids, truncated=True), sample("", [0])])
    assert result.status == ["ok"] * 3
    assert result.segments == [
        [Segment(1, 2.0), Segment(4, 3.0), Segment(6, 1.0)],
        [Segment(1, 2.0), Segment(4, 3.0), Segment(5, 1.0)],
        [Segment(0, 0.0)],
    ]
    assert result.value == [6.0, 6.0, 0.0]


class Unknown(SegmentScorer):
    """The second segment has no value."""

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        return [[1.0, math.nan, 2.0] for _ in samples]


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 6.0), ("min", 1.0), ("last", 1.0), ("mean", 2.0)])
def test_the_value_is_the_reduced_segments_or_unknown(bpe: PreTrainedTokenizerFast, reduce: Any, expected: float):
    reward = reward_of(bpe, reduce=reduce)
    assert reward([ended(bpe, "x\nyy\nz")]).value == [expected]
    reward.scorer = Unknown()
    (value,) = reward([ended(bpe, "x\nyy\nz")]).value
    assert math.isnan(value)


def test_segments_that_end_in_one_token_are_one_segment(bpe: PreTrainedTokenizerFast):
    ids = [*bpe.encode("x"), *bpe.encode(".\n\n"), *bpe.encode("x")]
    assert len(ids) == 3
    splitter = ByPattern(r"\.|\n")  # "x.", "\n" and "\n" end in the second token
    result = reward_of(bpe, splitter)([sample("x.\n\nx", [*ids, 0])])
    assert result.segments == [[Segment(1, 4.0), Segment(3, 1.0)]]
    splitter.close()


def test_the_last_of_too_many_segments_takes_the_rest(bpe: PreTrainedTokenizerFast):
    result = reward_of(bpe, max_segments=2)([ended(bpe, "x\nyy\nz\nx")])
    assert result.segments == [[Segment(1, 2.0), Segment(8, 6.0)]]


# Segments of a reward that fails, or gives them where there is no token


class Scripted(Reward):
    """What a test says of each sample's segments; its length stands for the sample."""

    def __init__(self, segments: dict[int, list[Segment]], breaks_on: int = 0) -> None:
        super().__init__()
        self.segments = segments
        self.breaks_on = breaks_on

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        lengths = [len(sample.token_ids) for sample in samples]
        if self.breaks_on in lengths:
            raise RuntimeError("broken")
        return RewardResult([0.0] * len(samples), ["ok"] * len(samples), segments=[self.segments[n] for n in lengths])


def test_segments_survive_a_failure_of_another_sample():
    segments = {2: [Segment(1, 0.5)], 4: [Segment(0, 1.0), Segment(3, -1.0)]}
    result = Scripted(segments, breaks_on=3)([sample("", [7] * 2), sample("", [7] * 3), sample("", [7] * 4)])
    assert result.status == ["ok", "error", "ok"]
    assert result.segments == [segments[2], [], segments[4]]
    assert math.isnan(result.value[1])


@pytest.mark.parametrize("ends", [[2], [-1], [1, 0], [1, 1]])
def test_segments_beyond_the_completion_are_an_error_of_the_sample(ends):
    result = Scripted({2: [Segment(end, 1.0) for end in ends]})([sample("", [7] * 2)])
    assert result.status == ["error"]
    assert math.isnan(result.value[0])
