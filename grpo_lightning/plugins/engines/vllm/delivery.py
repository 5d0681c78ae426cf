"""The proof that weights arrive at an engine with weights of its own: it is given others, and must draw from these."""

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

FACTORS = (1.01, 1.03, 1.1, 1.3, 2.0)  # the first that moves log-probs far beyond rounding
FAR = 10.0  # times the gap by rounding
NEAR = 0.25  # of the movement: the largest mean gap of an engine that has the weights
STEP = 2**32 - 2  # keys the random numbers
COMPLETIONS, TOKENS = 4, 8  # of each prompt


@torch.inference_mode(False)
@torch.no_grad()
def fault(engine: RolloutEngine, policy: Policy, push: Callable[[], None], num_prompts: int) -> str:
    """Why it is certain that weights do not arrive; nothing if they do. Every rank must call it.

    The policy's trained matrices are scaled, pushed, and pushed again as they were. `engine` has the weights before
    and after. Each of `num_prompts` prompts is looked at for itself: there may be as many servers.
    """
    rollouts = drawn(engine, policy, num_prompts)
    own = policy(rollouts).logp
    rounding = max(means(rollouts, rollouts.columns["sampler_logp"] - own))
    for factor in FACTORS:
        with scaled(policy, factor):
            moved = min(means(rollouts, policy(rollouts).logp - own))
        if min(ranks.gather(moved)) > FAR * max(ranks.gather(rounding)):
            break
    with scaled(policy, factor):
        push()
        rollouts = drawn(engine, policy, num_prompts)
        own = policy(rollouts).logp
    push()
    gaps, movements = (
        means(rollouts, rollouts.columns["sampler_logp"] - own),
        means(rollouts, policy(rollouts).logp - own),
    )
    found = [(gap / movement, gap, movement) for gap, movement in zip(gaps, movements, strict=True)]
    worst, gap, movement = max(max(ranks.gather(found)))
    if worst <= NEAR:
        return ""
    return (
        f"all matrices were scaled by {factor:g}, which moves the policy's log-probs by {movement:.2g} nats; "
        f"on average the sampler's are {gap:.2g} off those of the scaled policy. It draws from other weights"
    )


def drawn(engine: RolloutEngine, policy: Policy, num_prompts: int) -> Rollouts:
    """Completions of each of some prompts, which are alike."""
    prompt = [int(id) for id in policy.tokenizer.encode("1 2 3", add_special_tokens=False)][:8] or [0]
    requests = [Request(prompt, id, sample, 0) for id in range(num_prompts) for sample in range(COMPLETIONS)]
    ended = engine.complete(requests, Sampling(TOKENS), RandomKey(0, STEP))
    return Rollouts.from_lists(
        [prompt] * num_prompts,
        [request.prompt_id for request in requests],
        [one.token_ids for one in ended],
        columns={"sampler_logp": sampler_logp([one.logp for one in ended])},
    ).to(policy.device)


def means(rollouts: Rollouts, differences: Tensor) -> list[float]:
    """The mean size of [N] differences for each prompt."""
    sizes = rollouts.lengths.reshape(-1, COMPLETIONS).sum(1).tolist()
    return [float(part.abs().mean()) for part in differences.split(sizes)]


@contextmanager
def scaled(policy: Policy, factor: float) -> Iterator[None]:
    """The policy's trained matrices are larger inside; those that are 0, as an adapter's are, are not 0 there."""
    matrices = [weight for weight in policy.parameters() if weight.requires_grad and weight.ndim > 1]
    kept = [weight.detach().clone() for weight in matrices]
    try:
        for weight in matrices:
            is_zero = not bool((weight != 0).any())
            weight.add_((factor - 1) * 0.1) if is_zero else weight.mul_(factor)
        yield
    finally:
        for weight, own in zip(matrices, kept, strict=True):
            weight.copy_(own)
