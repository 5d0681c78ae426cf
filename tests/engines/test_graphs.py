"""Captured steps of decoding, on a stand-in for CUDA graphs that runs recorded operations and no Python."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from typing import Any

import pytest
import torch
from helpers.adapters import adapted, move
from helpers.other_device import other_device
from helpers.recorded_graph import RecordedGraphs
from helpers.tiny import policy_of, prompts_of, requests_of
from torch.distributed.device_mesh import DeviceMesh

from grpo_lightning.engines import graphs, linear_copies
from grpo_lightning.engines.graphs import CUDACapture, Graphs, column_bucket, row_bucket, rows_within
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey, UsageError

REQUESTS = requests_of([5, 1, 7], 12)
SAMPLING = Sampling(max_new_tokens=40)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[RecordedGraphs]:
    """The stand-in, with buckets of columns that tiny models fill."""
    monkeypatch.setattr(graphs, "COLUMNS", 16)
    return RecordedGraphs.install(monkeypatch)


def sampled(
    engine: NativeEngine, policy: Policy, sampling: Sampling = SAMPLING, requests: Any = REQUESTS
) -> list[Completion]:
    if not engine.has(policy):
        engine.sync(policy)
    return engine.generate(requests, sampling, RandomKey())


def assert_same(actual: list[Completion], expected: list[Completion], atol: float = 1e-5) -> None:
    assert [one.token_ids for one in actual] == [one.token_ids for one in expected]
    for one, other in zip(actual, expected, strict=True):
        assert one.finish_reason is other.finish_reason
        assert one.logp == pytest.approx(other.logp, abs=atol)


def assert_same_but_for_rounding(actual: list[Completion], expected: list[Completion]) -> None:
    """The same up to the first token that rounding has drawn otherwise, of a quarter of the rows at most."""
    agree = 0
    for one, other in zip(actual, expected, strict=True):
        same = [*takewhile(lambda pair: pair[0] == pair[1], zip(one.token_ids, other.token_ids, strict=False))]
        agree += one.token_ids == other.token_ids
        assert one.logp is not None and other.logp is not None
        assert one.logp[: len(same)] == pytest.approx(other.logp[: len(same)], abs=2e-2)
    assert agree >= 0.75 * len(expected)


def update(policy: Policy) -> None:
    """An optimizer's update, large enough for other completions."""
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=0.02)
    input_ids = torch.tensor([prompts_of([6])[0].token_ids])
    (-policy.logits(policy.hidden(input_ids, use_cache=False)).log_softmax(-1)[..., 7].mean()).backward()
    optimizer.step()
    policy.version += 1


# Buckets


def test_buckets_of_rows() -> None:
    buckets = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for rows in range(1, 257):
        assert row_bucket(rows) == min(bucket for bucket in buckets if bucket >= rows)
        assert rows_within(rows) == max(bucket for bucket in buckets if bucket <= rows)


def test_buckets_of_columns() -> None:
    assert [column_bucket(columns) for columns in (1, 127, 128, 129, 256)] == [128, 128, 128, 256, 256]


# The same completions


@pytest.mark.parametrize("shape", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("lengths", [[5, 1, 7], [4, 4]], ids=["ragged", "equal"])
def test_completions_are_those_without_graphs(shape: str, lengths: list[int], recorded: type[RecordedGraphs]) -> None:
    policy, requests = policy_of(shape, scale=0.1), requests_of(lengths, 12)
    sampling = Sampling(max_new_tokens=60)
    engine = NativeEngine(graphs=True, check_every=4)
    actual = sampled(engine, policy, sampling, requests)
    assert_same(actual, sampled(NativeEngine(check_every=4), policy, sampling, requests))
    assert engine._graphs is not None
    buckets = engine._graphs._steps.keys()
    # Rows ended, and positions were drawn, in several buckets of either.
    assert len({rows for rows, _ in buckets}) > 2 and len({columns for _, columns in buckets}) > 2
    # One more was captured in the trial.
    assert recorded.captured == len(buckets) + 1 < recorded.replayed / 2


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ["a", "bc", "9"]},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
        {"max_new_tokens": 1},
    ],
    ids=lambda options: " ".join(options),
)
def test_whatever_is_drawn_and_ends_it(options: dict[str, Any], recorded: type[RecordedGraphs]) -> None:
    policy, sampling = policy_of(scale=0.1), Sampling(**{"max_new_tokens": 40} | options)
    assert_same(sampled(NativeEngine(graphs=True), policy, sampling), sampled(NativeEngine(), policy, sampling))
    assert recorded.captured


def test_several_batches_share_the_captured_steps(recorded: type[RecordedGraphs]) -> None:
    policy = policy_of(scale=0.1)
    engine = NativeEngine(graphs=True, max_rows=13)
    expected = sampled(NativeEngine(), policy)
    assert_same(sampled(engine, policy), expected)
    assert engine._graphs is not None
    # The most rows that fit are those of a bucket.
    assert max(rows for rows, _ in engine._graphs._steps) == 8
    before = recorded.captured
    assert_same(sampled(engine, policy), expected)
    assert recorded.captured == before


def test_an_adapter_is_captured_with_its_layers(recorded: type[RecordedGraphs]) -> None:
    policy = adapted("llama")
    move(policy)
    engine = NativeEngine(graphs=True)
    assert_same(sampled(engine, policy), sampled(NativeEngine(), policy))
    before = recorded.captured
    update(policy)
    assert_same(sampled(engine, policy), sampled(NativeEngine(), policy))
    assert recorded.captured - before <= 3, "only buckets that were not needed before"


def test_what_a_cache_held_before_is_not_seen(recorded: type[RecordedGraphs]) -> None:
    """Weight 0 times NaN would be NaN."""
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    expected = sampled(engine, policy)
    assert engine._graphs is not None and engine._graphs._buffers is not None
    for states in engine._graphs._buffers.states:
        states.fill_(torch.nan)
    assert_same(sampled(engine, policy), expected, atol=0)


# Weights change


def test_captured_steps_survive_updates(recorded: type[RecordedGraphs]) -> None:
    """Greedy completions of one length: the same buckets whatever the weights."""
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    sampling = Sampling(max_new_tokens=24, temperature=0.0)
    policy.__class__ = type("Endless", (Policy,), {"stop_ids": frozenset()})
    found = [sampled(engine, policy, sampling)]
    captured = recorded.captured
    for _ in range(2):
        update(policy)
        engine.sleep()  # As between two steps of a run.
        found.append(sampled(engine, policy, sampling))
        assert_same(found[-1], sampled(NativeEngine(), policy, sampling))
        assert [one.logp for one in found[-1]] != [one.logp for one in found[-2]]
    assert recorded.captured == captured


def moved(policy: Policy) -> None:
    """Other weights at other addresses."""
    for parameter in policy.parameters():
        parameter.data = 0.5 * parameter.data
    policy.version += 1


@pytest.mark.parametrize("looks", [True, False], ids=["captured again", "not captured again"])
def test_moved_weights_are_captured_again(
    looks: bool, recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks:  # What would happen: the steps read the old weights.
        monkeypatch.setattr(Graphs, "_conditions", lambda self: None)
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    sampled(engine, policy)
    captured = recorded.captured
    moved(policy)
    actual, expected = sampled(engine, policy), sampled(NativeEngine(), policy)
    if looks:
        assert_same(actual, expected)
        assert recorded.captured > captured + 2
    else:
        assert actual != expected


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
def test_bfloat16_copies_are_refreshed_where_they_are(
    shape: str, recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_copies, "_packed_types", lambda: set())  # As on a GPU.
    policy, engine = policy_of(shape, scale=0.1), NativeEngine(graphs=True, dtype="bfloat16")
    first = sampled(engine, policy)
    assert engine._copies is not None
    copies, addresses = engine._copies, [one.data_ptr() for one in engine._copies.tensors()]
    for _ in range(2):
        update(policy)
        engine.sleep()
        assert engine._graphs is not None
        steps = dict(engine._graphs._steps)
        found = sampled(engine, policy)
        assert engine._copies is copies and [one.data_ptr() for one in copies.tensors()] == addresses
        assert engine._graphs._steps.items() >= steps.items(), "captured again"
        assert_same(found, sampled(NativeEngine(dtype="bfloat16"), policy), atol=1e-3)
        assert found != first


def test_packed_copies_are_made_again_and_captured_again(recorded: type[RecordedGraphs]) -> None:
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True, packed=True)
    if len(linear_copies.LinearCopies(policy, torch.float32)) == 0:
        pytest.skip("no oneDNN here")
    assert_same(sampled(engine, policy), sampled(NativeEngine(), policy))
    update(policy)
    assert_same(sampled(engine, policy), sampled(NativeEngine(), policy))


@pytest.mark.parametrize("copied", [True, False], ids=["copies of the layers", "casts in the step"])
def test_autocast_keeps_no_cast_of_earlier_weights(
    copied: bool, recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in would read a cast of earlier weights."""
    monkeypatch.setattr(linear_copies, "_packed_types", lambda: set())
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    for _ in range(2):
        if not copied:
            engine.sync(policy)  # Outside of autocast nothing is to be copied.
        with torch.autocast("cpu", torch.bfloat16):
            actual = sampled(engine, policy)
            assert (engine._copies is not None) == copied
            assert_same_but_for_rounding(actual, sampled(NativeEngine(), policy))
            assert_same(sampled(engine, policy), actual, atol=0)
        update(policy)
    assert engine._graphs is not None


def test_copies_of_another_type_are_made_again(recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_copies, "_packed_types", lambda: set())
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    expected = sampled(NativeEngine(), policy)
    for context in (torch.autocast("cpu", torch.bfloat16), nullcontext()):
        engine.sync(policy)
        with context:
            engine.sync(policy)
            actual = sampled(engine, policy)
    assert engine._copies is None
    assert_same(actual, expected)


def test_a_step_that_took_autocasts_copies_would_be_noticed(
    recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    engine.sync(policy)
    real = torch.autocast

    def cached(kind: str, cache_enabled: bool = True, **options: Any) -> AbstractContextManager[Any]:
        return real(kind, **options)

    with real("cpu", torch.bfloat16):
        monkeypatch.setattr(torch, "autocast", cached)
        first = sampled(engine, policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.5)
    with real("cpu", torch.bfloat16):
        monkeypatch.setattr(torch, "autocast", real)
        expected = sampled(NativeEngine(), policy)
        # The stand-in keeps the memory of earlier casts, which CUDA would give to others.
        assert engine.generate(REQUESTS, SAMPLING, RandomKey()) != expected != first


# Memory


def test_buffers_stay_between_calls_and_grow(recorded: type[RecordedGraphs]) -> None:
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    sampled(engine, policy)
    assert engine._graphs is not None
    small, captured = engine._graphs.num_bytes, recorded.captured
    addresses = [states.data_ptr() for states in engine._graphs._buffers.states]  # type: ignore[union-attr]
    # 2 layers, keys and values, 48 rows, 2 heads of 8 numbers, 48 columns.
    assert small == 2 * 2 * 48 * 2 * 8 * 48 * 4
    sampled(engine, policy, Sampling(max_new_tokens=9), requests_of([3], 4))
    assert [states.data_ptr() for states in engine._graphs._buffers.states] == addresses  # type: ignore[union-attr]
    assert recorded.captured <= captured + 1
    longer = Sampling(max_new_tokens=100)
    assert_same(sampled(engine, policy, longer), sampled(NativeEngine(), policy, longer))
    assert engine._graphs.num_bytes == small * column_bucket(107) // 48


def test_buffers_do_not_grow_beyond_what_fits(recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    sampled(engine, policy)
    assert engine._graphs is not None and engine._graphs._buffers is not None
    monkeypatch.setattr(engine._graphs, "_fits", lambda columns: 4 if columns > 48 else 48)
    expected = sampled(NativeEngine(), policy, Sampling(max_new_tokens=100), requests_of([3], 4))
    assert_same(sampled(engine, policy, Sampling(max_new_tokens=100), requests_of([3], 4)), expected)
    assert (engine._graphs._buffers.rows, engine._graphs._buffers.columns) == (4, 112)


def test_free_memory_includes_the_cache_that_is_held(
    recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    sampled(engine, policy)
    assert engine._graphs is not None
    monkeypatch.setattr("grpo_lightning.engines.native.free_bytes", lambda device: 0)
    assert engine._rows_that_fit(policy, 47) >= 24, "half of the 48 rows held: the rest is for logits"
    sampled(engine, policy)


def test_close_frees_everything(recorded: type[RecordedGraphs]) -> None:
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    expected = sampled(engine, policy)
    engine.sleep()
    assert engine._graphs is not None
    engine.close()
    assert engine._graphs is None and not engine.has(policy)
    assert_same(sampled(engine, policy), expected, atol=0)


def test_inference_mode_and_training_take_turns(recorded: type[RecordedGraphs], monkeypatch: Any) -> None:
    monkeypatch.setattr(linear_copies, "_packed_types", lambda: set())
    policy, engine = policy_of(scale=0.1), NativeEngine(graphs=True)
    for mode in (torch.inference_mode, nullcontext, torch.inference_mode):
        with mode():
            assert_same(sampled(engine, policy), sampled(NativeEngine(), policy))
        update(policy)


# Waits


@contextmanager
def on_other_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    recorded = RecordedGraphs.install(monkeypatch, "other")
    with other_device() as other:
        yield other, recorded


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_replay_never_waits(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at position 8, 16, 24 and 32, and nothing else."""
    expected = sampled(NativeEngine(dtype=dtype), policy_of(scale=0.02))
    with on_other_device(monkeypatch) as (other, recorded):
        policy = policy_of(scale=0.02)
        policy.to(other.device)
        engine = NativeEngine(graphs=True, dtype=dtype)
        waits, found = {}, {}
        sampled(engine, policy)
        captured = recorded.captured
        for new_tokens in (8, 40):
            other.syncs.clear()
            found[new_tokens] = sampled(engine, policy, Sampling(max_new_tokens=new_tokens))
            waits[new_tokens] = len(other.syncs)
        assert max(len(one.token_ids) for one in found[40]) > 32, "completions that end early would prove nothing"
        assert recorded.captured == captured and recorded.replayed > 40
    assert waits[40] - waits[8] <= 4, str(other.syncs)
    assert_same(found[40], expected, atol=1e-5 if dtype is None else 1e-2)


# Models without graphs


def test_a_cpu_has_no_graphs() -> None:
    policy, engine = policy_of(), NativeEngine(graphs=True)
    for use in (lambda: engine.check(policy, SAMPLING), lambda: sampled(engine, policy)):
        with pytest.raises(UsageError, match=r"model\.engine\.graphs=True: .* type cpu.*trainer\.accelerator=gpu"):
            use()


def without_graphs(policy: Policy, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes as ever, and logs once why."""
    logged: list[str] = []
    monkeypatch.setattr("grpo_lightning.engines.native.rank_zero_info", logged.append)
    engine = NativeEngine(graphs=True)
    for _ in range(2):
        assert_same(sampled(engine, policy), sampled(NativeEngine(), policy), atol=0)
    assert len(logged) == 1 and reason in logged[0] and "without graphs" in logged[0]
    assert engine._graphs is None


def test_windows_have_none(recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    without_graphs(policy_of("mistral", sliding_window=8), "sliding windows", monkeypatch)
    assert recorded.captured == 0


def test_sharded_weights_have_none(
    mesh: DeviceMesh, recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of()
    policy.shard(mesh)
    with policy.gathered():
        without_graphs(policy, "sharded", monkeypatch)


def test_a_model_that_waits_has_none(recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies that follow the longest sequence are found on the host."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    without_graphs(policy_of(rope_parameters=scaling), "capturing", monkeypatch)


def counts(policy: Policy) -> Any:
    """Makes the hidden states depend on a position that Python counts."""

    def scale(module: Any, args: Any, output: Any) -> None:
        states = output.last_hidden_state
        length, new = 0 if not output.past_key_values else output.past_key_values.get_seq_length(), states.shape[1]
        positions = torch.arange(new) if length < new else torch.tensor([length - 1])
        output.last_hidden_state = states * (1 + 0.05 * positions[:, None])

    return policy.trunk.register_forward_hook(scale)


@pytest.mark.parametrize("tries", [True, False], ids=["tried first", "not tried"])
def test_a_model_that_counts_in_python_has_none(
    tries: bool, recorded: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, requests = policy_of(scale=0.1), requests_of([4, 4], 6)
    counts(policy)
    if not tries:  # What would happen: the numbers are those of the position that was captured.
        monkeypatch.setattr(NativeEngine, "_fault_of_graphs", lambda *args: "")
    engine = NativeEngine(graphs=True)
    actual = sampled(engine, policy, SAMPLING, requests)
    expected = sampled(NativeEngine(), policy, SAMPLING, requests)
    assert (engine._graphs is None) == tries == (actual == expected)


# CUDA


class FakeCUDA:
    """What is called of torch.cuda, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.mode = 0
        fakes: dict[str, Callable[..., Any]] = {
            "graph_pool_handle": lambda: "pool",
            "Stream": lambda device: FakeStream("side", self),
            "current_stream": lambda device: FakeStream("main", self),
            "stream": lambda stream: self.inside(f"on {stream.name}"),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
            "CUDAGraph": lambda: self,
            "graph": lambda graph, pool, stream, capture_error_mode: self.inside(
                f"capture in {pool} on {stream.name}, {capture_error_mode}"
            ),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def set_mode(self, mode: Any) -> None:
        self.mode = mode
        self.calls.append(f"waits: {mode}")

    @contextmanager
    def inside(self, name: str) -> Any:
        self.calls.append(name)
        try:
            yield
        finally:
            self.calls.append(f"end of {name}")

    def replay(self) -> None:
        self.calls.append("replay")


class FakeStream:
    def __init__(self, name: str, cuda: FakeCUDA) -> None:
        self.name, self.cuda = name, cuda

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.calls.append(f"{self.name} waits for {other.name}")


def test_a_step_is_warmed_up_beside_and_then_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCUDA(monkeypatch)
    replay = CUDACapture(torch.device("cuda"))(lambda: cuda.calls.append("step"))
    replay()
    capture = "capture in pool on side, thread_local"
    assert cuda.calls == [
        *("side waits for main", "on side", "step", "waits: error", "step", "waits: 0", "end of on side"),
        *("main waits for side", capture, "step", f"end of {capture}", "replay"),
    ]


def test_a_wait_is_found_before_anything_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCUDA(monkeypatch)

    def step() -> None:
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        CUDACapture(torch.device("cuda"))(step)
    assert cuda.mode == 0 and not any("capture" in call for call in cuda.calls)


def test_torch_has_what_a_capture_calls() -> None:
    import inspect

    given = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"cuda_graph", "pool", "stream", "capture_error_mode"} <= given.keys()
    assert {"graph_pool_handle", "Stream", "current_stream", "CUDAGraph"} <= set(dir(torch.cuda))
