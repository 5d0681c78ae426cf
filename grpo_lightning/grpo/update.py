"""Line 11 of Algorithm 1: one optimizer update."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.grpo.step import MicroBatch, Minibatch, Parts
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.policy import sharding
from grpo_lightning.policy.machine import Machine


class Watcher:
    """Watches updates, and changes nothing.

    A callback that also derives from `Watcher` is called in each update. For whole steps see `Observer`.
    """

    def begin(self, minibatch: Minibatch) -> None:
        """Is called before the first forward of an update."""

    def see(self, micro_batch: MicroBatch) -> None:
        """Is called with each micro-batch after its forward and backward; `micro_batch.scored` has its log-probs."""

    def metrics(self, reduce: Callable[..., Any]) -> Mapping[str, Tensor]:
        """Returns metrics of the update over all ranks, from numbers that `reduce` sums. Every rank calls it.

        It may raise an exception to end the run.
        """
        return {}


def update(
    minibatch: Minibatch, parts: Parts, machine: Machine, grad_clip: float, watchers: Sequence[Watcher]
) -> tuple[bool, Mapping[str, Tensor] | None]:
    """Maximises the objective over one minibatch, by one step of the optimizer from gradients of zero.

    Args:
        minibatch: The micro-batches of this rank.
        parts: The policy, the objective and the other parts of the run.
        machine: Runs backward and the optimizer, and reduces numbers over ranks.
        grad_clip: Largest norm of the gradient; 0 does not clip.
        watchers: See each micro-batch after its backward, and add metrics.

    Returns:
        Two values: True if the optimizer made the update, and the metrics. The metrics are None if no token of any rank
        has a weight.
    """
    policy = parts.policy
    objective = parts.objective
    passes = minibatch.step.passes
    for watcher in watchers:
        watcher.begin(minibatch)

    # 1. Forward and backward: `gradients` makes both for each micro-batch. Gradients add up over micro-batches and
    # ranks, since a token's weight is a fraction of the whole batch.
    diagnostics: list[Diagnostics] = []
    forward = partial(objective_of, parts)
    for micro_batch, micro_batch_diagnostics in policy.compute.gradients(minibatch.micro_batches, forward, machine):
        assert micro_batch.layout is not None and micro_batch.scored is not None
        micro_batch.layout.free()  # memory that the next pass can fill again
        # Without log π_old this is the first update: π_θ is π_old. Its log-probs are log π_old of the next passes.
        if micro_batch.rollouts.old_logp is None:
            micro_batch.rollouts = micro_batch.rollouts.with_columns({"old_logp": micro_batch.scored.logp})
        diagnostics.append(micro_batch_diagnostics)
        for watcher in watchers:
            watcher.see(micro_batch)

    # 2. Clip. In float16 the gradients are scaled up, so the norm is too. From here on, decisions and logs use numbers
    # of all ranks, which leave a GPU in one transfer.
    norm = (
        torch.nn.utils.clip_grad_norm_(policy.parameters(), (grad_clip or math.inf) * machine.gradient_scale)
        / machine.gradient_scale
    )
    rank_total = sum(diagnostics[1:], diagnostics[0])
    total, (grad_norm,) = rank_total.reduce(machine.reduce).on_host(sharding.assembled(norm))
    watched: dict[str, Tensor] = {}
    for watcher in watchers:
        watched |= watcher.metrics(machine.reduce)

    # 3. Guard. There is no update if the gradient is not finite, or if a stop rule ends the passes in `record`.
    is_finite = bool(total.objective.isfinite() & grad_norm.isfinite())
    passes.record(total, is_finite)
    # Nor is there an update if no token has a weight: Adam's moments alone would move the weights.
    if not total.tokens:
        return False, None
    is_made = is_finite and not passes.ended

    # 4. Step.
    if is_made:
        machine.step()
        policy.mark_written()
        objective.entropy.observe(float(total.entropy / total.tokens))
        for micro_batch in minibatch.micro_batches:
            micro_batch.updated = True
    elif not passes.ended:
        machine.skip(total.objective, grad_norm)

    # 5. Log.
    metrics = total.metrics()
    if parts.reference is None:
        del metrics["policy/kl_ref"]
    return is_made, {**metrics, **objective.entropy.metrics(), "optim/grad_norm": grad_norm, **watched}


def objective_of(parts: Parts, micro_batch: MicroBatch) -> tuple[Tensor, tuple[MicroBatch, Diagnostics]]:
    """Computes J of one micro-batch by a forward of the policy.

    Returns:
        Two values: J with gradient, and the pair of micro-batch and diagnostics. `micro_batch.scored` is set.
    """
    policy = parts.policy
    objective = parts.objective
    rollouts = micro_batch.rollouts
    micro_batch.layout = micro_batch.layout or policy.compute.layout(rollouts)
    # A KL of whole distributions is computed inside the forward, by the function `read`. Other estimators need none.
    read = objective.kl.reading(parts.reference, policy, rollouts)
    scored = policy(rollouts, objective.entropy.coefficient > 0, layout=micro_batch.layout, read=read)
    value, diagnostics = objective(scored.logp, scored.entropy, rollouts, scored.read)
    micro_batch.scored = scored.detached
    return value, (micro_batch, diagnostics)
