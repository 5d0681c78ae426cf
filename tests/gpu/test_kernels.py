"""The attention kernels that PyTorch really takes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from helpers.sdpa_kernels import is_fast
from helpers.tiny import model_of, requests_of, rollouts_of, tokenizer
from packaging.version import Version
from policy.test_sdpa_kernels import CASES, MODELS, WAYS
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.policy.policy import Policy, recompute_activations
from grpo_lightning.types import RandomKey

FAST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Without cuDNN's, which takes more on one GPU than on another."""

PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "32-true": (torch.float32, False),
    "bf16-mixed": (torch.float32, True),
    "bfloat16 weights": (torch.bfloat16, False),
}


def there(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """An argument of attention on the device; a mask stays bool, and spread out where it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype != torch.bool:
        return value.to(device, dtype)
    return value[..., :1].to(device).expand(value.shape) if value.stride(-1) == 0 else value.to(device)


@pytest.mark.skipif(Version(torch.__version__) >= Version("2.14.dev0"), reason="sdpa_kernels.py knows 2.11 to 2.13")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rule_says_what_pytorch_chooses(dtype: torch.dtype, name: str, device: torch.device) -> None:
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        pytest.skip(f"sm{capability[0]}{capability[1]} is older than sm80")
    arguments = {name: there(value, dtype, device) for name, value in CASES[name][0].items()}
    with sdpa_kernel([*FAST, SDPBackend.MATH]):
        chosen = torch._fused_sdp_choice(**arguments)
    assert (SDPBackend(chosen) in FAST) == is_fast(**arguments)


def policy_in(precision: str, model: str, device: torch.device) -> tuple[Policy, AbstractContextManager[Any]]:
    dtype, mixed = PRECISIONS[precision]
    policy = Policy.from_model(model_of("llama", **MODELS[model]).to(dtype), tokenizer()).to(device)
    return policy, torch.autocast("cuda", dtype=torch.bfloat16) if mixed else nullcontext()


@pytest.mark.parametrize(("lengths", "precision"), WAYS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shares", [True, False], ids=["shared prefix", "rows"])
def test_training_runs_without_the_math_kernel(
    shares: bool, precision: str, model: str, lengths: list[int], device: torch.device
) -> None:
    policy, autocast = policy_in(precision, model, device)
    policy.shares_prefix &= shares
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
