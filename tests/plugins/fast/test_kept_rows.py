"""Turns of conversations: what the engine keeps between them, reads again, and drops."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.drawing import update
from helpers.fast import policy_of
from helpers.tiny import forced_logp, prompts_of, without_end

from grpo_lightning import Completion, NativeEngine, Policy, RandomKey, Request, Sampling
from grpo_lightning.plugins.fast import prefill
from grpo_lightning.plugins.fast.kept_rows import KeptRows
from grpo_lightning.plugins.fast.kv_memory import GIB, cache_bytes_per_token, row_bytes
from grpo_lightning.policy.architecture import cache_name

KEY = RandomKey(3, 1)
PROMPTS = prompts_of([4, 1, 9, 4, 6])
SHORT = Sampling(max_new_tokens=7)


def engine_of(policy: Policy, **options: Any) -> NativeEngine:
    engine = NativeEngine(**options)
    engine.sync(policy)
    return engine


def next_turn(requests: list[Request], completions: list[Completion], given: int = 3) -> list[Request]:
    """The requests after these: ragged answers of the environment follow the completions."""
    return [
        replace(
            request,
            token_ids=[*request.token_ids, *one.token_ids, *range(20 + row, 20 + row + given + row % 3)],
            position=request.position + len(one.token_ids),
        )
        for row, (request, one) in enumerate(zip(requests, completions, strict=True))
    ]


def turns_of(engine: NativeEngine, count: int = 3, sampling: Sampling = SHORT, group_size: int = 2) -> list[Any]:
    """Requests and completions of each turn of conversations."""
    requests, turns = Request.from_prompts(PROMPTS, group_size), []
    for _ in range(count):
        completions = engine.complete(requests, sampling, KEY)
        turns.append((requests, completions))
        requests = next_turn(requests, completions)
    return turns


def assert_scored_as_teacher_forced(policy: Policy, turns: list[Any]) -> None:
    """A plain forward over each conversation finds the recorded log-probs."""
    for requests, completions in turns:
        for request, one in zip(requests, completions, strict=True):
            expected = forced_logp(policy.model, request.token_ids, one.token_ids)
            assert one.logp == pytest.approx(expected.tolist(), abs=1e-5)


def assert_same(left: list[Any], right: list[Any]) -> None:
    """The same draws, and the same log-probs up to rounding."""
    for (requests, kept), (others, whole) in zip(left, right, strict=True):
        assert requests == others
        for one, other in zip(kept, whole, strict=True):
            assert one.token_ids == other.token_ids
            assert one.finish_reason is other.finish_reason
            assert one.logp == pytest.approx(other.logp, abs=1e-5)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """[rows, tokens] of every forward over more than one new token, or after kept rows."""
    sizes: list[tuple[int, int]] = []
    hidden = Policy.hidden

    def noted(self: Policy, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        cache = kwargs.get(cache_name(self.trunk))
        if cache is not None and (input_ids.shape[1] > 1 or isinstance(cache.layers[0], prefill._PackLayer)):
            sizes.append(tuple(input_ids.shape))
        return hidden(self, input_ids, **kwargs)

    monkeypatch.setattr(Policy, "hidden", noted)
    return sizes


@pytest.mark.parametrize("stops", [True, False])
def test_turns_draw_the_same_and_are_scored_as_a_plain_forward_scores_them(policy: Policy, stops: bool) -> None:
    if not stops:
        without_end(policy)
    engine = engine_of(policy, check_every=3)
    whole = turns_of(engine)
    with engine.conversations():
        assert engine._kept is not None
        kept = turns_of(engine)
    assert engine._kept is None
    assert_same(kept, whole)
    assert_scored_as_teacher_forced(policy, kept)
    assert len({len(one.token_ids) for _, completions in kept for one in completions}) > 1 or not stops


@pytest.mark.parametrize("options", [{"max_rows": 3}, {"check_every": 1}, {"packed": True}], ids=str)
def test_rows_at_once_and_the_time_of_dropping_them_do_not_matter(options: dict[str, Any]) -> None:
    policy = policy_of()
    whole = turns_of(engine_of(policy))
    engine = engine_of(policy, **options)
    with engine.conversations():
        assert_same(turns_of(engine), whole)


def test_a_turn_reads_only_what_is_new(read: list[tuple[int, int]]) -> None:
    engine = engine_of(without_end(policy_of("llama")))
    with engine.conversations():
        read.clear()
        turns_of(engine)
    # The last drawn token has no keys yet; the longest answer has five tokens.
    assert read == [(5, 9), (10, 6), (10, 6)]
    read.clear()
    turns_of(engine)
    assert [rows for rows, _ in read] == [5, 10, 10]
    assert [width for _, width in read] == [9, 9 + 7 + 5, 9 + 2 * (7 + 5)]


def test_a_history_that_is_rewritten_is_read_from_where_it_differs(read: list[tuple[int, int]]) -> None:
    policy = without_end(policy_of("llama"))
    engine = engine_of(policy)
    requests = Request.from_prompts(PROMPTS, 1)
    with engine.conversations():
        turn = next_turn(requests, engine.complete(requests, SHORT, KEY))
        turn[0].token_ids[2] += 1  # of four tokens in the prompt
        turn[2].token_ids[0] += 1
        turn[3].token_ids[:] = turn[3].token_ids[:3]  # shorter than what is kept
        read.clear()
        found = engine.complete(turn, SHORT, KEY)
    # One prompt from its start, one from its third token on, the others from where they ended.
    assert read == [(1, len(turn[2].token_ids)), (4, len(turn[0].token_ids) - 2)]
    assert_same([(turn, found)], [(turn, engine.complete(turn, SHORT, KEY))])
    assert_scored_as_teacher_forced(policy, [(turn, found)])


def test_other_weights_read_everything_again(read: list[tuple[int, int]]) -> None:
    policy = without_end(policy_of("llama"))
    engine = engine_of(policy)
    requests = Request.from_prompts(PROMPTS, 1)
    with engine.conversations():
        turn = next_turn(requests, engine.complete(requests, SHORT, KEY))
        update(policy)
        engine.sync(policy)
        read.clear()
        found = engine.complete(turn, SHORT, KEY)
        assert read == [(5, max(len(request.token_ids) for request in turn))]
    assert_scored_as_teacher_forced(policy, [(turn, found)])


@pytest.mark.parametrize("shape", ["mistral", "gemma3_text"])
def test_a_model_with_sliding_windows_keeps_nothing(shape: str) -> None:
    policy = policy_of(shape, sliding_window=4)
    engine = engine_of(policy)
    whole = turns_of(engine)
    with engine.conversations():
        assert engine._kept is None
        assert_same(turns_of(engine), whole)


def test_what_finds_no_room_is_read_again(monkeypatch: pytest.MonkeyPatch, read: list[tuple[int, int]]) -> None:
    policy = without_end(policy_of("llama"))
    whole = turns_of(engine_of(policy))
    dtype = policy.model.dtype
    # Two rows of the last turn decoded at once, and 40 tokens beside them.
    longest = max(len(request.token_ids) for request in whole[-1][0]) + 7
    room = 2 * row_bytes(policy.config, dtype, longest) + 40 * cache_bytes_per_token(policy.config, dtype)
    engine = engine_of(policy, max_cache_gib=room / GIB, max_rows=2)
    held: list[tuple[int, int]] = []
    save = KeptRows.save

    def noted(kept: KeptRows, *args: Any) -> None:
        save(kept, *args)
        held.append((kept.num_tokens, kept.limit))

    read.clear()
    turns_of(engine)
    without = sum(rows * width for rows, width in read)
    monkeypatch.setattr(KeptRows, "save", noted)
    with engine.conversations():
        held.clear()
        read.clear()
        assert_same(turns_of(engine), whole)
    assert sum(rows * width for rows, width in read) < without
    assert all(0 < tokens <= limit for tokens, limit in held)
    assert held[-1][1] == 40
