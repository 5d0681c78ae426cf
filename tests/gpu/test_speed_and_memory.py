"""How fast decoding is and how much memory a pass takes, against bounds that a wrong kernel or cast breaks."""

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.tiny import requests_of, rollouts_of, tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_lightning import Fast, NativeEngine, Policy, RandomKey, Sampling

MIB = 2**20
WIDE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
"""A Llama of 90 million weights with a vocabulary of 64."""


def wide(dtype: torch.dtype = torch.float32, **sizes: Any) -> Policy:
    """A policy of `WIDE`, or of other sizes, with random weights on the GPU."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**WIDE | sizes), attn_implementation="sdpa")
    return Policy.from_model(model.to(device="cuda", dtype=dtype), tokenizer(), compute=Fast())


@pytest.fixture
def _endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a completion."""
    monkeypatch.setattr(Policy, "stop_ids", frozenset())


def tokens_per_second(policy: Policy, autocast: bool) -> float:
    engine = NativeEngine()
    engine.sync(policy)
    context = torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext()
    for max_new_tokens in (8, 256):  # The first is a warm-up.
        torch.cuda.synchronize()
        started = time.perf_counter()
        with context:
            completions = engine.complete(
                requests_of([64] * 4, 32), Sampling(max_new_tokens=max_new_tokens), RandomKey()
            )
    return sum(len(completion.token_ids) for completion in completions) / (time.perf_counter() - started)


@pytest.mark.usefixtures("_endless")
def test_decoding_in_bfloat16_is_no_slower_than_in_float32(figures: Any) -> None:
    policy = wide()
    speed = {"float32": tokens_per_second(policy, False), "bf16-mixed": tokens_per_second(policy, True)}
    speed["bfloat16 weights"] = tokens_per_second(
        Policy.from_model(policy.model.bfloat16(), policy.tokenizer, compute=Fast()), False
    )
    for name, value in speed.items():
        figures.add(f"decoding 128 rows, 90M weights, {name}", value, "tokens/s")
    assert speed["bfloat16 weights"] > 0.8 * speed["float32"]


@pytest.mark.parametrize("shares", [True, False], ids=["shared prefix", "rows"])
@pytest.mark.parametrize("autocast", [False, True], ids=["32-true", "bf16-mixed"])
def test_no_scores_are_kept_for_the_backward_pass(shares: bool, autocast: bool, figures: Any) -> None:
    """One layer and 4,096 tokens: all scores of 16 heads are 1 GiB in float32, and the math kernel keeps them twice."""
    policy = wide(num_hidden_layers=1)
    policy.compute.shares_prefix &= shares
    policy.train()
    rollouts = rollouts_of([3968, 64], [64]).to("cuda")
    context = torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext()
    policy(rollouts_of([8, 8], [8]).to("cuda")).logp.sum().backward()  # Gradients and cuBLAS's workspace exist.
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with context:
        logp = policy(rollouts).logp
    logp.sum().backward()
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    name = f"{'shared prefix' if shares else 'rows'}, {'bf16-mixed' if autocast else '32-true'}"
    figures.add(f"peak of forward and backward, 1 layer, 4,096 tokens, {name}", peak, "MiB")
    # By rows the short completion is padded to the long one: twice the tokens.
    assert peak < (1000 if shares else 1600)


def test_the_vocabulary_head_works_in_chunks(figures: Any) -> None:
    """8,192 tokens x 128,000 logits are 3.9 GiB in float32; a chunk is 128 MiB, a few of them exist at once."""
    policy = wide(num_hidden_layers=1, vocab_size=128_000)
    rollouts = rollouts_of([2048] * 4, [16]).to("cuda")
    policy.model.requires_grad_(False)
    policy.model.get_input_embeddings().requires_grad_(True)  # A gradient reaches all layers but no head's weight.
    policy(rollouts_of([8, 8], [8]).to("cuda")).logp.sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    policy(rollouts).logp.sum().backward()
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    figures.add("peak of forward and backward, 8,192 tokens, vocabulary of 128,000", peak, "MiB")
    # Activations of one layer, the gradient of the embedding (500 MiB) and a few chunks.
    assert peak < 2900


@pytest.mark.usefixtures("_endless")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_holds_the_cache_and_little_else(dtype: torch.dtype, figures: Any) -> None:
    """Keys and values: 8 layers x 2 x 4 heads x 64 numbers per token, for 64 rows of 1,088 tokens at most."""
    policy = wide(dtype)
    engine = NativeEngine()
    engine.sync(policy)
    engine.complete(requests_of([8], 2), Sampling(max_new_tokens=2), RandomKey())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.complete(requests_of([64] * 8, 8), Sampling(max_new_tokens=1024), RandomKey())
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    cache = 8 * 2 * 4 * 64 * 64 * 1088 * dtype.itemsize / MIB
    figures.add(f"peak of decoding, {dtype}, cache of {cache:.0f} MiB", peak, "MiB")
    assert cache * 0.9 < peak < 1.25 * cache + 100
