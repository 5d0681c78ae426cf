"""The attention kernels that PyTorch really takes."""

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import pytest
import torch
from helpers.tiny import model_of, requests_of, rollouts_of, tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_lightning import Fast, NativeEngine, Policy, RandomKey, Sampling
from grpo_lightning.plugins.compute.fast.attention import additive
from grpo_lightning.policy.architecture import recompute_activations

FAST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""All but the math kernel and cuDNN's, which is switched off where attention is chosen."""

MODELS: dict[str, dict[str, int]] = {
    "MHA": {"num_key_value_heads": 4},
    "GQA": {"num_key_value_heads": 2},
    "MQA": {"num_key_value_heads": 1},
}
WAYS = [([6, 6], "32-true"), ([3, 9], "32-true"), ([3, 9], "bf16-mixed"), ([6, 6], "bfloat16 weights")]
PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "32-true": (torch.float32, False),
    "bf16-mixed": (torch.float32, True),
    "bfloat16 weights": (torch.bfloat16, False),
}


def policy_in(precision: str, model: str, device: torch.device) -> tuple[Policy, AbstractContextManager[Any]]:
    dtype, mixed = PRECISIONS[precision]
    policy = Policy.from_model(model_of("llama", **MODELS[model]).to(dtype), tokenizer(), compute=Fast()).to(device)
    return policy, torch.autocast("cuda", dtype=torch.bfloat16) if mixed else nullcontext()


@pytest.mark.parametrize(("lengths", "precision"), WAYS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shares", [True, False], ids=["shared prefix", "rows"])
def test_training_runs_without_the_math_kernel(
    shares: bool, precision: str, model: str, lengths: list[int], device: torch.device
) -> None:
    policy, autocast = policy_in(precision, model, device)
    policy.compute.shares_prefix &= shares
    policy.train()
    recompute_activations(policy.model)
    rollouts = rollouts_of([20, 1, 5, 90, 7], lengths).to(device)
    with sdpa_kernel(FAST):  # "No available kernel" where math would be needed.
        with autocast:
            logp = policy(rollouts).logp
        logp.sum().backward()
    assert bool(logp.isfinite().all())


@pytest.mark.parametrize(("lengths", "precision"), WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_decoding_runs_without_the_math_kernel(
    precision: str, model: str, lengths: list[int], device: torch.device
) -> None:
    policy, autocast = policy_in(precision, model, device)
    engine = NativeEngine(check_every=4)
    engine.sync(policy)
    with sdpa_kernel(FAST), autocast:
        completions = engine.complete(requests_of(lengths, 4), Sampling(max_new_tokens=12), RandomKey())
    assert len(completions) == 8


CALLS = {"equal prompts": (32, 7, False), "decoding": (32, 7, True), "shared prefix": (8, 700, True)}
"""Rows, queries of each key head, and whether there is a mask."""


def inputs_of(call: str, keys: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    rows, queries, is_masked = CALLS[call]
    sizes = (queries, keys, keys)
    states = [torch.randn(rows, 2, size, 64, device=device, dtype=torch.bfloat16) for size in sizes]
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    return states, additive(seen, torch.bfloat16) if is_masked else None


@pytest.mark.parametrize("call", CALLS)
def test_torch_takes_a_fast_kernel_by_itself(call: str, device: torch.device) -> None:
    """In torch's own order, whatever the card: neither cuDNN's kernel nor the math kernel."""
    states, mask = inputs_of(call, 300, device)
    choice = torch._fused_sdp_choice(*states, attn_mask=mask, dropout_p=0.0, is_causal=False)
    assert SDPBackend(choice) in FAST


@pytest.mark.parametrize("call", CALLS)
def test_a_new_shape_costs_no_plan(call: str, device: torch.device) -> None:
    """Every decoded position is a new shape. cuDNN would plan each for 0.4 s; the best of three has no other reason."""
    seconds = []
    for keys in (301, 309, 317, 325):
        states, mask = inputs_of(call, keys, device)
        torch.cuda.synchronize()
        started = perf_counter()
        torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask)
        torch.cuda.synchronize()
        seconds.append(perf_counter() - started)
    # The first call makes the libraries' handles.
    assert min(seconds[1:]) < 0.1
