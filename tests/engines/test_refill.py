"""Completions that wait join those that go on: the same completions, in fewer passes and within the same memory."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.command import Grpo
from helpers.drawing import hands_over_what_it_returns
from helpers.fitting import fitted_scalars
from helpers.tiny import SHAPES, policy_of, requests_of, teacher_forced
from torch import Tensor

from grpo_lightning.engines import prompt_part
from grpo_lightning.engines.kv_memory import GIB, row_bytes
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.running import Running
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.slab import SlabLayer
from grpo_lightning.engines.waiting import Waiting
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey, Request

LENGTHS = {"ragged": [4, 1, 9, 4, 6], "equal": [5, 5, 5, 5]}
SAMPLING = {
    "all": {},
    "greedy": {"temperature": 0.0, "stop": ["a", "b", "c", "7", "8", "9"]},
    "strings": {"stop": ["a", "7"]},
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows that went on and rows that joined them, of every refill."""
    rows: list[tuple[int, int]] = []
    join = Running.join

    def noted(running: Running, other: Running, columns: int) -> None:
        rows.append((len(running), len(other)))
        join(running, other, columns)

    monkeypatch.setattr(Running, "join", noted)
    return rows


def drawn(
    policy: Policy, lengths: list[int], group_size: int = 4, new_tokens: int = 24, sampling: Any = None, **options: Any
) -> list[Completion]:
    engine = NativeEngine(**options)
    engine.sync(policy)
    settings = Sampling(max_new_tokens=new_tokens, **(sampling or {}))
    return engine.generate(requests_of(lengths, group_size), settings, RandomKey(2, 1))


def assert_same(found: list[Completion], expected: list[Completion], within: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason, one.stop_string) == (
            other.token_ids,
            other.finish_reason,
            other.stop_string,
        )
        assert one.logp == pytest.approx(other.logp, abs=within)


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "copies"])
@pytest.mark.parametrize("shape", SHAPES)
def test_refilled_rows_are_those_of_batches(
    monkeypatch: Any, joined: Any, shape: str, shared: bool, lengths: list[int], sampling: Any
) -> None:
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0 if shared else 2**60)
    policy = policy_of(shape)
    expected = drawn(policy, lengths, sampling=sampling, refill=False)
    assert not joined
    # 24 is no multiple of 5: the last look of a row comes early, also for rows that have joined it.
    for options in ({"max_rows": 5, "check_every": 5}, {"max_rows": 9, "check_every": 2}, {"max_rows": 2}):
        assert_same(drawn(policy, lengths, sampling=sampling, **options), expected)
    # Equal prompts are completed equally by the likeliest tokens, so few rows go on where others have ended.
    assert len(joined) > (1 if "temperature" in sampling else 6)
    assert all(going and new for going, new in joined)
    for request, one in zip(requests_of(lengths, 4), expected, strict=True):
        right = teacher_forced(policy.model, request.token_ids, one.token_ids)
        assert one.logp == pytest.approx(
            right.gather(-1, torch.tensor(one.token_ids)[:, None]).squeeze(-1).tolist(), abs=1e-5
        )


@pytest.mark.parametrize("window", [2, 6])
@pytest.mark.parametrize("shape", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sliding_windows_slide_over_refilled_rows(joined: Any, shape: str, window: int, lengths: list[int]) -> None:
    policy = policy_of(shape, scale=0.1, sliding_window=window)
    expected = drawn(policy, lengths, refill=False)
    assert_same(drawn(policy, lengths, max_rows=5, check_every=3), expected)
    assert joined


@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "copies"])
def test_in_bfloat16_refilled_rows_round_as_others(monkeypatch: Any, joined: Any, shared: bool) -> None:
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0 if shared else 2**60)
    # Rounding, which differs between machines, decides what is drawn: so many rows that some end early anywhere.
    policy, lengths = policy_of("llama", scale=0.1), 3 * LENGTHS["ragged"]
    with torch.autocast("cpu", torch.bfloat16):
        found = drawn(policy, lengths, max_rows=8, check_every=3)
    assert joined
    off = []
    for request, one in zip(requests_of(lengths, 4), found, strict=True):
        right = teacher_forced(policy.model, request.token_ids, one.token_ids)
        off.append((right.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0] - torch.tensor(one.logp)).abs())
    assert torch.cat(off).mean() < 0.05


@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "copies"])
def test_what_was_in_memory_before_does_not_matter(monkeypatch: Any, joined: Any, shared: bool) -> None:
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0 if shared else 2**60)
    policy, allocate = policy_of("llama"), SlabLayer._allocate
    expected = drawn(policy, LENGTHS["ragged"], max_rows=5, check_every=3)

    def with_nan(layer: SlabLayer, *args: Any) -> None:
        allocate(layer, *args)
        layer.key_slab.fill_(torch.nan)
        layer.value_slab.fill_(torch.nan)

    monkeypatch.setattr(SlabLayer, "_allocate", with_nan)
    assert drawn(policy, LENGTHS["ragged"], max_rows=5, check_every=3) == expected
    assert joined


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("options", [{"max_rows": 5, "check_every": 3}, {"max_rows": 8, "threads": 2}], ids=str)
def test_refilled_rows_are_handed_over(joined: Any, options: dict[str, Any], sampling: dict[str, Any]) -> None:
    hands_over_what_it_returns(NativeEngine(**options), policy_of("gpt2"), **sampling)
    assert joined or "temperature" in sampling


def test_one_that_waited_is_handed_over_before_a_long_one_of_the_first_rows() -> None:
    policy, engine, order = policy_of("gpt2", scale=0.05), NativeEngine(max_rows=8, check_every=2), []
    engine.sync(policy)
    requests = requests_of([5] * 6, 4)
    found = engine.generate(
        requests, Sampling(max_new_tokens=48), RandomKey(2, 1), None, lambda index, one: order.append(index)
    )
    assert sorted(order) == [*range(24)]
    assert max(len(one.token_ids) for one in found[:8]) > 30
    last_of_first_rows = max(order.index(index) for index in range(8))
    assert any(index >= 8 for index in order[:last_of_first_rows])


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("options", [{}, {"packed": True}, {"share_prompts": False}], ids=str)
def test_threads_refill_from_their_own_part(joined: Any, threads: int, options: dict[str, Any]) -> None:
    policy = policy_of("llama")
    expected = drawn(policy, LENGTHS["ragged"], refill=False)
    assert_same(drawn(policy, LENGTHS["ragged"], max_rows=10, check_every=3, threads=threads, **options), expected)
    assert joined and all(going + new <= 10 // threads for going, new in joined)
    # Fewer rows than threads.
    assert_same(drawn(policy, LENGTHS["ragged"], max_rows=1, threads=threads, **options), expected)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of every forward."""
    shapes: list[tuple[int, int]] = []
    hidden = Policy.hidden

    def noted(policy: Policy, input_ids: Tensor, **kwargs: Any) -> Tensor:
        shapes.append((input_ids.shape[0], input_ids.shape[1]))
        return hidden(policy, input_ids, **kwargs)

    monkeypatch.setattr(Policy, "hidden", noted)
    return shapes


def test_fewer_positions_are_decoded_with_more_rows(forwards: list[tuple[int, int]]) -> None:
    policy, positions, rows = policy_of("llama", scale=0.05), {}, {}
    for refill in (False, True):
        forwards.clear()
        drawn(policy, [5] * 8, 4, 64, max_rows=8, check_every=2, refill=refill)
        decoded = [rows for rows, tokens in forwards if tokens == 1]
        positions[refill], rows[refill] = len(decoded), sum(decoded) / len(decoded)
        assert max(decoded) == 8
        # Each prompt is read once, its group of 4 being no more than half of the rows.
        assert sum(rows for rows, tokens in forwards if tokens > 1) == 8
    assert positions[True] < 0.75 * positions[False]
    assert rows[True] > 1.3 * rows[False]


@pytest.mark.parametrize("options", [{"max_rows": 20}, {"max_rows": 8, "refill": False}], ids=str)
def test_where_nothing_waits_or_refill_is_off_batches_are_those_of_before(
    joined: Any, options: dict[str, Any], forwards: list[tuple[int, int]]
) -> None:
    policy, lengths = policy_of("llama"), [9, 6, 4, 4, 1]
    found = drawn(policy, lengths, **options)
    assert not joined
    shapes = [*forwards]
    forwards.clear()
    requests, whole = requests_of(lengths, 4), NativeEngine(refill=False)
    whole.sync(policy)
    rows = options["max_rows"]
    parts = [requests[first : first + rows] for first in range(0, len(requests), rows)]
    expected = [one for part in parts for one in whole.generate(part, Sampling(max_new_tokens=24), RandomKey(2, 1))]
    assert found == expected
    assert shapes == forwards


def test_rows_that_are_kept_between_turns_are_decoded_in_batches(joined: Any) -> None:
    policy, engine = policy_of("llama"), NativeEngine(max_rows=5, check_every=3)
    engine.sync(policy)
    with engine.conversations():
        engine.generate(requests_of([5] * 4, 4), Sampling(max_new_tokens=24), RandomKey())
        assert engine._kept is not None and engine._kept.num_tokens
    assert not joined


def seen_everywhere(running: Running, length: int) -> Tensor:
    return torch.ones(len(running), length, dtype=torch.bool)


def one_too_far(running: Running, token: Tensor, position: Tensor, decode: Any = Running.decode) -> None:
    decode(running, token, position + int(running.joined))


@pytest.mark.parametrize(("name", "wrong"), [("_mask_of", seen_everywhere), ("decode", one_too_far)])
@pytest.mark.parametrize("share", [True, False])
def test_a_model_that_would_decode_them_wrongly_is_decoded_in_batches(
    joined: Any, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any], share: bool
) -> None:
    policy, requests, sampling = policy_of("llama"), requests_of(LENGTHS["ragged"], 4), Sampling(max_new_tokens=24)
    right = drawn(policy, LENGTHS["ragged"], refill=False)
    for is_wrong in (False, True):
        if is_wrong:
            monkeypatch.setattr(Running, name, wrong)
        engine = NativeEngine(max_rows=5, check_every=3, share_prompts=share)
        engine.check(policy, sampling)
        # The check is of refilled rows, with copies and then with shared prompts.
        assert len(joined) == (1 if is_wrong else 1 + share)
        joined.clear()
        engine.sync(policy)
        assert_same(engine.generate(requests, sampling, RandomKey(2, 1)), right)
        assert bool(joined) is not is_wrong
        joined.clear()


class Held:
    """The largest cache that is held at once, in bytes: whatever a slab or the prompts of one take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: weakref.WeakSet[SlabLayer] = weakref.WeakSet()
        self.most = self.most_in_between = self.largest_layer = 0
        initialize, allocate, hidden = SlabLayer.__init__, SlabLayer._allocate, Policy.hidden

        def made(layer: SlabLayer, capacity: int) -> None:
            initialize(layer, capacity)
            self.layers.add(layer)

        def allocated(layer: SlabLayer, *args: Any) -> None:
            before = self.bytes_of(layer)
            allocate(layer, *args)
            self.most_in_between = max(self.most_in_between, self.now() + before)
            self.largest_layer = max(self.largest_layer, before, self.bytes_of(layer))

        def passed(policy: Policy, *args: Any, **kwargs: Any) -> Tensor:
            found = hidden(policy, *args, **kwargs)
            self.most = max(self.most, self.now())
            return found

        monkeypatch.setattr(SlabLayer, "__init__", made)
        monkeypatch.setattr(SlabLayer, "_allocate", allocated)
        monkeypatch.setattr(Policy, "hidden", passed)

    @staticmethod
    def bytes_of(layer: SlabLayer) -> int:
        if not layer.is_initialized:
            return 0
        parts = [layer.prompts.keys, layer.prompts.values] if layer.prompts else []
        storages = {one.data_ptr(): one.nbytes() for one in (
            tensor.untyped_storage() for tensor in (layer.key_slab, layer.value_slab, *parts)
        )}  # fmt: skip
        return sum(storages.values())

    def now(self) -> int:
        return sum(map(self.bytes_of, self.layers))


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "copies"])
def test_refilled_rows_stay_within_the_memory(
    joined: Any, monkeypatch: pytest.MonkeyPatch, rows: int, shared: bool
) -> None:
    policy, lengths = policy_of("llama", num_hidden_layers=4), [30, 9, 9, 4, 4, 4, 1, 1]
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0 if shared else 2**60)
    expected = drawn(policy, lengths, refill=False)
    held = Held(monkeypatch)
    bound = rows * row_bytes(policy.config, torch.float32, 30 + 24)
    assert_same(drawn(policy, lengths, max_cache_gib=bound / GIB, check_every=3), expected)
    assert bound / (4 if shared else 2) < held.most <= bound
    # While one layer is made of two, as while rows are compacted.
    assert held.most_in_between <= bound + held.largest_layer
    # After the longest prompts more rows fit.
    assert max(going + new for going, new in joined) > rows


def test_what_begins_when_by_hand() -> None:
    def request(tokens: int) -> Request:
        return Request([7] * tokens, 0, 0)

    groups = [[request(9)] * 4, [request(5)] * 4, [request(5)] * 9, [request(2)] * 3]
    asked: list[int] = []
    waiting = Waiting(groups, lambda tokens: asked.append(tokens) or 10, 20)
    assert len(waiting) == 20
    # Two groups; of the third, which has more than half of 10 rows, what is free.
    assert waiting.take(0, 0) == [range(4), range(4, 8), range(8, 10)]
    # Less than a quarter is free.
    assert waiting.take(8, 9) == []
    assert waiting.take(7, 9) == [range(10, 13)]
    assert waiting.take(5, 9) == [range(13, 17)], "a group of 3 is not cut"
    assert len(waiting) == 3
    assert waiting.take(8, 5) == []
    assert waiting.take(7, 5) == [range(17, 20)]
    assert not waiting
    # The prompts that go on may be longer.
    assert asked == [29, 29, 29, 29, 25, 25]
    few = Waiting([[request(3)] * 2], lambda tokens: 10, 20)
    assert few.take(8, 3) == [range(2)], "nothing more would wait"
    assert Waiting(groups, None, 20).take(0, 0) == [range(4), range(4, 8), range(8, 17), range(17, 20)]


TWO_STEPS = (
    "--trainer.max_epochs=2",
    "--loop.num_minibatches=1",
    "--model.sampling.max_new_tokens=24",
    "--model.engine.max_rows=6",
    "--model.engine.check_every=2",
)


def test_a_run_that_refills_has_the_scalars_of_one_that_does_not(grpo: Grpo, joined: Any) -> None:
    batches = fitted_scalars(grpo, "batches", *TWO_STEPS, "--model.engine.refill=false")
    assert not joined
    refilled = fitted_scalars(grpo, "refilled", *TWO_STEPS)
    # More than the one of the check.
    assert len(joined) > 1
    assert set(refilled) == set(batches)
    for name in batches:
        if not name.startswith(("time/", "perf/")):
            assert refilled[name] == pytest.approx(batches[name], rel=1e-3, abs=1e-5), name
