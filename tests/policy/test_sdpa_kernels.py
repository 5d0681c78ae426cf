"""No call of attention needs the math kernel on a GPU of sm80 or newer: it would write all scores to memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from helpers.sdpa_kernels import Call, attention_calls, is_fast
from helpers.tiny import model_of, requests_of, rollouts_of, tokenizer

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.policy.policy import Policy, recompute_activations
from grpo_lightning.types import RandomKey


def states(
    heads: int = 8, key_heads: int = 8, size: int = 64, length: int = 16, value_size: int | None = None
) -> dict[str, torch.Tensor]:
    return {
        "query": torch.empty(2, heads, 16, size),
        "key": torch.empty(2, key_heads, length, size),
        "value": torch.empty(2, key_heads, length, value_size or size),
    }


MASK = torch.ones(2, 1, 16, 16, dtype=torch.bool)
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    # arguments, whether there is a fast kernel in bfloat16, and in float32
    "causal": (states() | {"is_causal": True}, True, True),
    "mask": (states() | {"attn_mask": MASK}, True, True),
    "grouped queries": (states(key_heads=2) | {"is_causal": True, "enable_gqa": True}, True, False),
    "grouped queries without saying so": (states(key_heads=2) | {"is_causal": True}, False, False),
    "grouped queries under a mask": (states(key_heads=2) | {"attn_mask": MASK, "enable_gqa": True}, False, False),
    "values of another size": (states(size=192, value_size=128) | {"is_causal": True}, True, True),
    "causal, more keys than queries": (states(length=24) | {"is_causal": True}, True, True),
    "odd head size": (states(size=20) | {"is_causal": True}, True, True),
    "odd head size under a mask": (states(size=20) | {"attn_mask": MASK}, False, True),
    "a mask spread over the keys": (states() | {"attn_mask": MASK[..., :1].expand(2, 1, 16, 16)}, False, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rules_of_pytorch(name):
    arguments, *expected = CASES[name]
    for dtype, fast in zip((torch.bfloat16, torch.float32), expected, strict=True):
        cast = {n: v.to(dtype) if n in ("query", "key", "value") else v for n, v in arguments.items()}
        assert is_fast(**cast) == fast, dtype


# What the policy and the engine call

MODELS: dict[str, dict[str, Any]] = {
    "MHA": {"num_key_value_heads": 4},
    "GQA": {"num_key_value_heads": 2},
    "MQA": {"num_key_value_heads": 1},
}
PRECISIONS: dict[str, tuple[torch.dtype, Callable[[], AbstractContextManager[Any]]]] = {
    "32-true": (torch.float32, nullcontext),
    "bf16-mixed": (torch.float32, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "bfloat16 weights": (torch.bfloat16, nullcontext),
}
WAYS = [([6, 6], "32-true"), ([3, 9], "32-true"), ([3, 9], "bf16-mixed"), ([6, 6], "bfloat16 weights")]


def policy_in(precision: str, model: str, family: str = "llama") -> tuple[Policy, AbstractContextManager[Any]]:
    dtype, autocast = PRECISIONS[precision]
    return Policy.from_model(model_of(family, **MODELS[model]).to(dtype), tokenizer()), autocast()


def assert_fast(calls: list[Call]) -> None:
    assert calls
    slow = {call for call in calls if not call.fast}
    assert not slow, "\n".join(map(str, slow))


@pytest.mark.parametrize(("lengths", "precision"), WAYS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shares", [True, False], ids=["shared prefix", "rows"])
def test_training_needs_no_math_kernel(shares, precision, model, lengths):
    policy, autocast = policy_in(precision, model)
    policy.shares_prefix &= shares
    policy.train()
    recompute_activations(policy.model)
    rollouts = rollouts_of([20, 1, 5, 200, 7], lengths)
    policy.model.config.max_position_embeddings = 512
    with attention_calls() as calls, autocast:
        policy(rollouts).logp.sum().backward()
    assert any(call.gradient for call in calls)
    assert_fast(calls)


@pytest.mark.parametrize(("lengths", "precision"), WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_decoding_needs_no_math_kernel(precision, model, lengths):
    policy, autocast = policy_in(precision, model)
    engine = NativeEngine(check_every=4, share_prompts=False)  # As on a GPU.
    engine.sync(policy)
    with attention_calls() as calls, autocast:
        engine.complete(requests_of(lengths, 4), Sampling(max_new_tokens=12), RandomKey())
    assert {call.begins for call in calls} == {True, False}, "prefill and decoding"
    assert_fast(calls)
