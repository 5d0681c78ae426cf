"""Proves that weights arrive at an engine with copies: it is sent scaled weights, and must sample from them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.engines.engine import RolloutEngine
from grpo_lightning.engines.sampler import sampler_logp
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request

FACTORS = (1.01, 1.03, 1.1, 1.3, 2.0)
"""Factors of the weights. The first that moves log-probs far beyond rounding is taken."""
FAR = 10.0
"""A movement of this many times the gap by rounding is far."""
NEAR = 0.25
"""Largest mean gap of an engine that has the weights, as a fraction of the movement."""
STEP = 2**32 - 2
"""The exploration step that keys the random numbers."""
COMPLETIONS, TOKENS = 4, 8  # of each prompt


@torch.inference_mode(False)
@torch.no_grad()
def fault(engine: RolloutEngine, policy: Policy, push: Callable[[], None], num_prompts: int) -> str:
    """Returns why it is certain that weights do not arrive; empty if they arrive. Every rank must call it.

    The policy's trained matrices are scaled, pushed, and pushed again as they were.

    Args:
        engine: It has the weights before and after.
        policy: The policy whose weights it should have.
        push: Gives the engine the weights.
        num_prompts: Number of prompts. Each is looked at by itself, since each may go to another server.
    """
    # The gap of an engine that has the weights.
    rollouts = sampled_rollouts(engine, policy, num_prompts)
    policy_logp = policy(rollouts).logp
    rounding = max(mean_sizes(rollouts, rollouts.columns["sampler_logp"] - policy_logp))

    # A factor that moves log-probs far beyond it, for every prompt of every rank.
    for factor in FACTORS:
        with scaled(policy, factor):
            movement = min(mean_sizes(rollouts, policy(rollouts).logp - policy_logp))
        if min(ranks.gather(movement)) > FAR * max(ranks.gather(rounding)):
            break

    # The gap to the scaled policy, beside what scaling moves.
    with scaled(policy, factor):
        push()
        rollouts = sampled_rollouts(engine, policy, num_prompts)
        scaled_logp = policy(rollouts).logp
    push()
    gaps = mean_sizes(rollouts, rollouts.columns["sampler_logp"] - scaled_logp)
    movements = mean_sizes(rollouts, policy(rollouts).logp - scaled_logp)
    results = [(gap / movement, gap, movement) for gap, movement in zip(gaps, movements, strict=True)]
    fraction, gap, movement = max(max(ranks.gather(results)))
    if fraction <= NEAR:
        return ""
    return (
        f"all matrices were scaled by {factor:g}, which moves the policy's log-probs by {movement:.2g} nats; "
        f"on average the sampler's are {gap:.2g} off those of the scaled policy. It draws from other weights"
    )


def sampled_rollouts(engine: RolloutEngine, policy: Policy, num_prompts: int) -> Rollouts:
    """Samples completions of a short prompt, under `num_prompts` prompt ids."""
    prompt = [int(id) for id in policy.tokenizer.encode("1 2 3", add_special_tokens=False)][:8] or [0]
    requests = [Request(prompt, id, sample, 0) for id in range(num_prompts) for sample in range(COMPLETIONS)]
    completions = engine.complete(requests, Sampling(TOKENS), RandomKey(0, STEP))
    return Rollouts.from_lists(
        [prompt] * num_prompts,
        [request.prompt_id for request in requests],
        [completion.token_ids for completion in completions],
        columns={"sampler_logp": sampler_logp([completion.logp for completion in completions])},
    ).to(policy.device)


def mean_sizes(rollouts: Rollouts, differences: Tensor) -> list[float]:
    """[N] differences -> the mean absolute difference for each prompt."""
    num_tokens = rollouts.lengths.reshape(-1, COMPLETIONS).sum(1).tolist()
    return [float(values.abs().mean()) for values in differences.split(num_tokens)]


@contextmanager
def scaled(policy: Policy, factor: float) -> Iterator[None]:
    """A context in which the policy's trained matrices are larger, and matrices of zeros are not 0."""
    matrices = [weight for weight in policy.parameters() if weight.requires_grad and weight.ndim > 1]
    originals = [weight.detach().clone() for weight in matrices]
    try:
        for weight in matrices:
            # A new adapter has matrices of zeros.
            is_zero = not bool((weight != 0).any())
            weight.add_((factor - 1) * 0.1) if is_zero else weight.mul_(factor)
        yield
    finally:
        for weight, original in zip(matrices, originals, strict=True):
            weight.copy_(original)
