"""Keys and values that the native engine keeps between the turns of conversations: reused, reread and dropped."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from helpers.drawing import update
from helpers.fast import policy_of
from helpers.tiny import forced_logp, prompts_of, without_end

from grpo_lightning import Completion, NativeEngine, Policy, RandomKey, Request, Sampling
from grpo_lightning.plugins.engines.native import prefill
from grpo_lightning.plugins.engines.native.kept_rows import KeptRows
from grpo_lightning.plugins.engines.native.kv_memory import GIB, cache_bytes_per_token, row_bytes
from grpo_lightning.policy.architecture import cache_name

KEY = RandomKey(3, 1)
PROMPTS = prompts_of([4, 1, 9, 4, 6])
NUM_PROMPTS = 5
NUM_NEW_TOKENS = 7
SAMPLING = Sampling(max_new_tokens=NUM_NEW_TOKENS)


class Turn(NamedTuple):
    """One turn of all conversations."""

    requests: list[Request]
    completions: list[Completion]


def engine_of(policy: Policy, **options: Any) -> NativeEngine:
    engine = NativeEngine(**options)
    engine.sync(policy)
    return engine


def complete(engine: NativeEngine, requests: list[Request]) -> Turn:
    return Turn(requests, engine.complete(requests, SAMPLING, KEY))


def next_requests(turn: Turn) -> list[Request]:
    """The requests of the turn after it: the environment answers each completion with three to five tokens."""
    requests = []
    for row, (request, completion) in enumerate(zip(*turn, strict=True)):
        answer = range(20 + row, 23 + row + row % 3)
        token_ids = [*request.token_ids, *completion.token_ids, *answer]
        position = request.position + len(completion.token_ids)
        requests.append(replace(request, token_ids=token_ids, position=position))
    return requests


def three_turns(engine: NativeEngine) -> list[Turn]:
    """Conversations of three turns, two for each prompt."""
    turns = [complete(engine, Request.from_prompts(PROMPTS, 2))]
    turns.append(complete(engine, next_requests(turns[-1])))
    turns.append(complete(engine, next_requests(turns[-1])))
    return turns


def assert_scored_as_teacher_forced(policy: Policy, turns: list[Turn]) -> None:
    """The recorded log-probs are those of a plain forward over each conversation."""
    for turn in turns:
        for request, completion in zip(*turn, strict=True):
            expected = forced_logp(policy.model, request.token_ids, completion.token_ids)
            assert completion.logp == pytest.approx(expected.tolist(), abs=1e-5)


def assert_same(actual_turns: list[Turn], expected_turns: list[Turn]) -> None:
    """Both have the same tokens, and the same log-probs up to rounding."""
    for actual_turn, expected_turn in zip(actual_turns, expected_turns, strict=True):
        assert actual_turn.requests == expected_turn.requests
        for actual, expected in zip(actual_turn.completions, expected_turn.completions, strict=True):
            assert actual.token_ids == expected.token_ids
            assert actual.finish_reason is expected.finish_reason
            assert actual.logp == pytest.approx(expected.logp, abs=1e-5)


def num_read(prefills: list[tuple[int, int]]) -> int:
    return sum(rows * width for rows, width in prefills)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """[rows, tokens] of every forward that reads tokens which were not sampled one by one."""
    shapes: list[tuple[int, int]] = []
    hidden = Policy.hidden

    def recording(self: Policy, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        cache = kwargs.get(cache_name(self.trunk))
        # Decoding reads one token per row. A prefill reads more, or has a cache of its own class.
        if cache is not None and (input_ids.shape[1] > 1 or isinstance(cache.layers[0], prefill._PromptLayer)):
            shapes.append(tuple(input_ids.shape))
        return hidden(self, input_ids, **kwargs)

    monkeypatch.setattr(Policy, "hidden", recording)
    return shapes


@pytest.mark.parametrize("stops", [True, False])
def test_kept_rows_do_not_change_tokens_or_log_probs(policy: Policy, stops: bool) -> None:
    if not stops:
        without_end(policy)
    engine = engine_of(policy, check_every=3)
    expected = three_turns(engine)
    with engine.conversations():
        assert engine._kept_rows is not None
        actual = three_turns(engine)
    assert engine._kept_rows is None
    assert_same(actual, expected)
    assert_scored_as_teacher_forced(policy, actual)
    # With stop tokens the completions are ragged, which is the harder case.
    lengths = {len(completion.token_ids) for turn in actual for completion in turn.completions}
    assert len(lengths) > 1 or not stops


@pytest.mark.parametrize("options", [{"max_rows": 3}, {"check_every": 1}, {"packed": True}], ids=str)
def test_options_of_decoding_do_not_change_tokens(options: dict[str, Any]) -> None:
    policy = policy_of()
    expected = three_turns(engine_of(policy))
    engine = engine_of(policy, **options)
    with engine.conversations():
        assert_same(three_turns(engine), expected)


def test_a_turn_reads_only_new_tokens(prefills: list[tuple[int, int]]) -> None:
    engine = engine_of(without_end(policy_of("llama")))
    longest_prompt, longest_answer = 9, 5

    with engine.conversations():
        prefills.clear()
        three_turns(engine)
    # A later turn reads the answer, and the last sampled token: sampling it needed no forward over it.
    assert prefills == [(5, longest_prompt), (10, 1 + longest_answer), (10, 1 + longest_answer)]

    prefills.clear()
    three_turns(engine)
    # Outside a conversation a turn reads all of its history.
    assert [rows for rows, _ in prefills] == [5, 10, 10]
    turn_length = NUM_NEW_TOKENS + longest_answer
    expected_widths = [longest_prompt, longest_prompt + turn_length, longest_prompt + 2 * turn_length]
    assert [width for _, width in prefills] == expected_widths


def test_a_rewritten_history_is_read_from_where_it_differs(prefills: list[tuple[int, int]]) -> None:
    policy = without_end(policy_of("llama"))
    engine = engine_of(policy)
    with engine.conversations():
        requests = next_requests(complete(engine, Request.from_prompts(PROMPTS, 1)))
        requests[0].token_ids[2] += 1  # the third of the prompt's four tokens
        requests[2].token_ids[0] += 1  # the first token
        requests[3].token_ids[:] = requests[3].token_ids[:3]  # fewer tokens than are kept
        prefills.clear()
        turn = complete(engine, requests)
    # One prompt is read from its start. The width of the others is that of the one read from its third token.
    assert prefills == [(1, len(requests[2].token_ids)), (4, len(requests[0].token_ids) - 2)]
    assert_same([turn], [complete(engine, requests)])
    assert_scored_as_teacher_forced(policy, [turn])


def test_new_weights_read_the_whole_history(prefills: list[tuple[int, int]]) -> None:
    policy = without_end(policy_of("llama"))
    engine = engine_of(policy)
    with engine.conversations():
        requests = next_requests(complete(engine, Request.from_prompts(PROMPTS, 1)))
        update(policy)
        engine.sync(policy)
        prefills.clear()
        turn = complete(engine, requests)
        assert prefills == [(NUM_PROMPTS, max(len(request.token_ids) for request in requests))]
    assert_scored_as_teacher_forced(policy, [turn])


@pytest.mark.parametrize("shape", ["mistral", "gemma3_text"])
def test_a_model_with_sliding_windows_keeps_nothing(shape: str) -> None:
    policy = policy_of(shape, sliding_window=4)
    engine = engine_of(policy)
    expected = three_turns(engine)
    with engine.conversations():
        assert engine._kept_rows is None
        assert_same(three_turns(engine), expected)


def test_rows_beyond_the_memory_limit_are_read_again(
    monkeypatch: pytest.MonkeyPatch, prefills: list[tuple[int, int]]
) -> None:
    policy = without_end(policy_of("llama"))
    expected = three_turns(engine_of(policy))

    # Memory for decoding two rows of the last turn at once, and for keeping 40 tokens.
    max_rows, max_kept_tokens = 2, 40
    longest = max(len(request.token_ids) for request in expected[-1].requests) + NUM_NEW_TOKENS
    decoding = max_rows * row_bytes(policy.config, policy.model.dtype, longest)
    keeping = max_kept_tokens * cache_bytes_per_token(policy.config, policy.model.dtype)
    engine = engine_of(policy, max_cache_gib=(decoding + keeping) / GIB, max_rows=max_rows)

    prefills.clear()
    three_turns(engine)
    num_read_without_keeping = num_read(prefills)

    tokens_and_limits: list[tuple[int, int]] = []
    save = KeptRows.save

    def recording(self: KeptRows, *args: Any) -> None:
        save(self, *args)
        tokens_and_limits.append((self.num_tokens, self.limit))

    monkeypatch.setattr(KeptRows, "save", recording)
    with engine.conversations():
        prefills.clear()
        assert_same(three_turns(engine), expected)
    assert num_read(prefills) < num_read_without_keeping
    assert all(0 < num_tokens <= limit for num_tokens, limit in tokens_and_limits)
    assert tokens_and_limits[-1][1] == max_kept_tokens
