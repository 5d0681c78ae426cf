"""A prompt computed once for its whole group gives what it gives computed once a completion."""

import pytest
import torch
from helpers.fast import policy_of
from helpers.fitting import relative
from helpers.tiny import gradients, rollouts_of

from grpo_lightning import Policy, Rollouts
from grpo_lightning.plugins.compute.fast import shared_prefix
from grpo_lightning.plugins.compute.fast.shared_prefix import Bucket, buckets_of
from grpo_lightning.policy.architecture import recompute_activations


def both_ways(policy: Policy, rollouts: Rollouts) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    found = []
    rollouts.temperature = 0.7
    for shares in (True, False):
        policy.compute.shares_prefix = shares
        policy.zero_grad()
        logp = policy(rollouts).logp
        (logp * rollouts.advantage).sum().backward()
        found.append((logp.detach(), dict(gradients(policy))))
    return found


def test_a_long_completion_pads_no_short_ones() -> None:
    buckets = [bucket for bucket, _ in buckets_of([0] + [3] * 9, [3] + [20] * 8 + [1000])]
    assert buckets == [Bucket(1, 0, 3), Bucket(8, 3, 20), Bucket(1, 3, 1000)]


@pytest.mark.parametrize("seed", range(2))
def test_padding_is_bounded_by_half(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = (64 * torch.randn(200, generator=generator).exp()).long().clamp(16, 3000).tolist()
    buckets = [bucket for bucket, _ in buckets_of([5, 9] * 100, lengths)]
    assert sum(bucket.rows * bucket.length for bucket in buckets) <= 1.5 * sum(lengths)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_long_completions_go_in_blocks_of_queries(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, rollouts = policy_of(shape, scale=0.05), rollouts_of([25, 9, 30, 17, 24], [4, 6])
    (_, whole), (single, expected) = both_ways(policy, rollouts)
    monkeypatch.setattr(shared_prefix, "BLOCK", 8)
    rollouts.layout = None
    (blocks, gradient), _ = both_ways(policy, rollouts)
    assert float((blocks - single).abs().max()) < 2e-6
    assert relative(gradient, expected) < 1e-6 and relative(whole, expected) < 1e-6


def test_gradient_checkpointing_sees_the_same_layout() -> None:
    policy, rollouts = policy_of(scale=0.05), rollouts_of([5, 1, 9, 3], [4, 2])
    (_, plain), _ = both_ways(policy, rollouts)
    recompute_activations(policy.model)
    policy.train()
    (_, checkpointed), _ = both_ways(policy, rollouts)
    assert relative(checkpointed, plain) < 1e-6
