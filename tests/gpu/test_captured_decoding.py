"""Decoding in CUDA graphs: the completions of decoding without, across updates, and how much faster it is."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from helpers.adapters import adapted, move
from helpers.tiny import policy_of, prompts_of, requests_of, tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_lightning.engines import graphs
from grpo_lightning.engines.graphs import CUDACapture, Graphs
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey

REQUESTS = requests_of([5, 1, 7], 12)
CONTEXTS = {"float32": nullcontext, "bf16-mixed": lambda: torch.autocast("cuda", dtype=torch.bfloat16)}
SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
"""The shape of Qwen2.5-0.5B, with a smaller vocabulary."""


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an element per captured step, and buckets of columns that tiny models fill."""
    made: list[int] = []
    call = CUDACapture.__call__
    monkeypatch.setattr(CUDACapture, "__call__", lambda self, step: made.append(1) or call(self, step))
    monkeypatch.setattr(graphs, "COLUMNS", 16)
    return made


def sampled(engine: NativeEngine, policy: Policy, **sampling: Any) -> list[Completion]:
    if not engine.has(policy):
        engine.sync(policy)
    return engine.generate(REQUESTS, Sampling(**{"max_new_tokens": 60} | sampling), RandomKey())


def compare(actual: list[Completion], expected: list[Completion], atol: float, differ: int) -> float:
    """The largest difference of log-probs up to the first other token; all but `differ` completions are the same."""
    assert sum(one.token_ids != other.token_ids for one, other in zip(actual, expected, strict=True)) <= differ
    largest = 0.0
    for one, other in zip(actual, expected, strict=True):
        assert one.logp and other.logp
        for token, logp, other_token, other_logp in zip(
            one.token_ids, one.logp, other.token_ids, other.logp, strict=False
        ):
            if token != other_token:
                break
            largest = max(largest, abs(logp - other_logp))
    assert largest < atol
    return largest


def update(policy: Policy) -> None:
    """An optimizer's update, large enough for other completions."""
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=0.02, fused=True)
    input_ids = torch.tensor([prompts_of([6])[0].token_ids], device=policy.device)
    (-policy.logits(policy.hidden(input_ids, use_cache=False)).log_softmax(-1)[..., 7].mean()).backward()
    optimizer.step()
    policy.version += 1


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "lora"])
@pytest.mark.parametrize("precision", CONTEXTS)
def test_completions_are_those_without_graphs_across_updates(
    kind: str, precision: str, device: torch.device, captured: list[int], figures: Any
) -> None:
    policy = adapted("llama") if kind == "lora" else policy_of(kind, scale=0.1)
    if kind == "lora":
        move(policy)
    policy.to(device)
    engine, largest, rounds = NativeEngine(graphs=True, check_every=4), 0.0, []
    atol, differ = (1e-3, 1) if precision == "float32" else (0.3, 18)
    for _ in range(3):
        with CONTEXTS[precision]():
            actual = sampled(engine, policy)
            largest = max(largest, compare(actual, sampled(NativeEngine(check_every=4), policy), atol, differ))
        rounds.append([completion.logp for completion in actual])
        assert engine._graphs is not None, "it fell back"
        steps = dict(engine._graphs._steps)
        update(policy)
        engine.sleep()
        with CONTEXTS[precision]():
            sampled(engine, policy)
        assert engine._graphs._steps.items() >= steps.items(), "an update captured again"
    assert rounds[0] != rounds[1] != rounds[2]
    assert len(captured) == len(engine._graphs._steps) + 1  # type: ignore[union-attr]
    figures.add(f"log-prob difference in graphs, {kind}, {precision}", largest, "nats")


def test_moved_weights_are_captured_again(device: torch.device, captured: list[int]) -> None:
    policy, engine = policy_of(scale=0.1).to(device), NativeEngine(graphs=True)
    sampled(engine, policy)
    before = len(captured)
    for parameter in policy.parameters():
        parameter.data = 0.5 * parameter.data
    policy.version += 1
    compare(sampled(engine, policy), sampled(NativeEngine(), policy), 1e-3, 1)
    assert len(captured) > before


def test_bfloat16_copies_stay_where_they_are(device: torch.device, captured: list[int]) -> None:
    policy, engine = policy_of("qwen2", scale=0.1).to(device), NativeEngine(graphs=True, dtype="bfloat16")
    addresses = []
    for _ in range(3):
        compare(sampled(engine, policy), sampled(NativeEngine(dtype="bfloat16"), policy), 0.3, 18)
        assert engine._copies is not None
        addresses.append([copy.data_ptr() for copy in engine._copies.tensors()])
        update(policy)
    assert addresses[0] == addresses[1] == addresses[2]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_replay_never_waits(
    deterministic: bool, device: torch.device, captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(deterministic)
    policy, engine = policy_of(scale=0.1).to(device), NativeEngine(graphs=True)
    expected, before, decode = sampled(engine, policy), len(captured), Graphs.decode

    def guarded(self: Graphs, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode(self, token, position)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Graphs, "decode", guarded)
    actual = sampled(engine, policy)
    assert [one.token_ids for one in actual] == [one.token_ids for one in expected]
    assert len(captured) == before


def test_a_model_that_waits_is_decoded_without(device: torch.device) -> None:
    """And the GPU can be used afterwards."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    policy, engine = policy_of(rope_parameters=scaling).to(device), NativeEngine(graphs=True)
    compare(sampled(engine, policy), sampled(NativeEngine(), policy), 1e-3, 1)
    assert engine._graphs is None


def test_memory_is_given_back_when_it_closes(device: torch.device, figures: Any) -> None:
    policy = policy_of(scale=0.1).to(device)
    sampled(NativeEngine(), policy)
    before = torch.cuda.memory_allocated()
    engine = NativeEngine(graphs=True)
    sampled(engine, policy)
    figures.add(
        "memory held by graphs and cache of a tiny model", (torch.cuda.memory_allocated() - before) / 2**20, "MiB"
    )
    engine.close()
    assert torch.cuda.memory_allocated() <= before + 2**20


def tokens_per_second(policy: Policy, engine: NativeEngine, rows: int, context: AbstractContextManager[Any]) -> float:
    """Of 256 new tokens per row after prompts of 64, two rows per prompt or more."""
    requests = requests_of([64] * 4, rows // 4)
    with context:
        engine.sync(policy)
        for _ in range(2):  # The first captures.
            torch.cuda.synchronize()
            started = time.perf_counter()
            completions = engine.generate(requests, Sampling(max_new_tokens=256), RandomKey())
    return sum(len(one.token_ids) for one in completions) / (time.perf_counter() - started)


@pytest.mark.parametrize("rows", [8, 64, 256])
def test_graphs_are_faster(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, figures: Any) -> None:
    monkeypatch.setattr(Policy, "stop_ids", frozenset())
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="sdpa")
    policy, speed = Policy.from_model(model.to(device), tokenizer()), {}
    for name, on in (("without graphs", False), ("with graphs", True)):
        engine = NativeEngine(graphs=on)
        autocast = torch.autocast("cuda", dtype=torch.bfloat16)
        speed[name] = tokens_per_second(policy, engine, rows, autocast)
        assert (engine._graphs is not None) == on
        engine.close()
        figures.add(f"decoding {rows} rows, 0.4B weights, bf16-mixed, {name}", speed[name], "tokens/s")
    if rows == 8:  # The host launches 24 layers of small kernels; a GPU waits for them.
        assert speed["with graphs"] > speed["without graphs"]
