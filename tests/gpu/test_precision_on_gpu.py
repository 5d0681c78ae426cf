"""Numbers on the device: against the CPU's, bfloat16 against float32, and ratios that are exactly 1."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast import fit, policy_of
from helpers.fitting import scalars
from helpers.tiny import prompts_of, rollouts_of

from grpo_lightning import Clipped, NativeEngine, Objective, RandomKey, Request, Rollouts, Sampling, SequenceClipped

GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
LENGTHS = [20, 1, 5, 90, 7, 33]


@pytest.mark.parametrize("shares", [True, False], ids=["shared prefix", "rows"])
@pytest.mark.parametrize("shape", ["llama", "qwen3", "gpt2"])
def test_float32_is_the_cpus(shape: str, shares: bool, device: torch.device) -> None:
    policy, rollouts = policy_of(shape), rollouts_of(LENGTHS, [4, 9])
    policy.compute.shares_prefix &= shares
    with torch.no_grad():
        expected = policy(rollouts).logp
        actual = policy.to(device)(rollouts.to(device)).logp
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shares", [True, False], ids=["shared prefix", "rows"])
def test_mixed_precision_is_near_float32(shares: bool, device: torch.device) -> None:
    """bfloat16 keeps 8 bits: log-probs of this model are off by under 0.01 nats on average, by under 0.1 at most."""
    policy, rollouts = policy_of(scale=0.1).to(device), rollouts_of(LENGTHS, [4, 9]).to(device)
    policy.compute.shares_prefix &= shares
    found = []
    for context in (nullcontext(), torch.autocast("cuda", dtype=torch.bfloat16)):
        with torch.no_grad(), context:
            found.append(policy(rollouts).logp)
    assert found[1].dtype == torch.float32
    difference = (found[0] - found[1]).abs()
    assert 0 < float(difference.mean()) < 0.01
    assert float(difference.max()) < 0.1


def standing_still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.parametrize(("num_minibatches", "max_tokens"), [(1, 0), (4, 60)])
@pytest.mark.parametrize("surrogate", [Clipped, SequenceClipped])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_ratio_of_a_policy_that_stands_still_is_exactly_1(
    precision: str, surrogate: Any, num_minibatches: int, max_tokens: int, tmp_path: Path
) -> None:
    fit(
        tmp_path,
        optimizer=standing_still,
        objective=Objective(surrogate(), beta=0.1),
        loop={"mu": 2, "num_minibatches": num_minibatches, "max_tokens": max_tokens},
        trainer={"max_epochs": 2, "precision": precision} | GPU,
    )
    logged = scalars(tmp_path)
    assert set(logged["policy/ratio_max"].values()) == {1.0}
    assert set(logged["policy/clip_low"].values()) | set(logged["policy/clip_high"].values()) == {0.0}


def test_the_engine_draws_from_the_policys_distribution(device: torch.device) -> None:
    policy, prompts = policy_of().to(device), prompts_of([5, 1, 9])
    engine = NativeEngine()
    engine.sync(policy)
    completions = engine.complete(Request.from_prompts(prompts, 8), Sampling(max_new_tokens=48), RandomKey())
    rollouts = Rollouts.from_lists(
        [prompt.token_ids for prompt in prompts],
        [row // 8 for row in range(len(completions))],
        [completion.token_ids for completion in completions],
    ).to(device)
    noted = torch.tensor([logp for completion in completions for logp in completion.logp], device=device)
    with torch.no_grad():
        gap = float((policy(rollouts).logp - noted).abs().max())
    assert gap < 1e-4
