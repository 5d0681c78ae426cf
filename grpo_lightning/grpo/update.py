"""Line 11 of Algorithm 1: one optimizer update."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.grpo.step import MicroBatch, Minibatch, Parts
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.policy import sharding
from grpo_lightning.policy.machine import Machine


class Watcher:
    """Watches updates, and changes nothing.

    A callback that is a `Watcher` too sees each micro-batch that was scored.
    """

    def begin(self, minibatch: Minibatch) -> None:
        """An update of these micro-batches begins."""

    def see(self, micro_batch: MicroBatch) -> None:
        """A pack was scored, before the update: `pack.scored`."""

    def metrics(self, reduce: Callable[..., Any]) -> Mapping[str, Tensor]:
        """The numbers to log, over all ranks; it may stop the run. Every rank calls it."""
        return {}


def update(
    minibatch: Minibatch, parts: Parts, machine: Machine, grad_clip: float, watchers: Sequence[Watcher]
) -> tuple[bool, Mapping[str, Tensor] | None]:
    """Maximises the objective over one minibatch, from gradients of zero, clipped to the norm `grad_clip`; 0 does not.

    Returns:
        True if the weights moved, and the metrics; None where there was nothing to learn from.
    """
    policy, passes, objective = parts.policy, minibatch.step.passes, parts.objective

    def forward(micro_batch: MicroBatch) -> tuple[Tensor, tuple[MicroBatch, Diagnostics]]:
        micro_batch.layout = micro_batch.layout or policy.compute.layout(micro_batch.rollouts)
        read = objective.kl.reading(parts.reference, policy, micro_batch.rollouts)
        scored = policy(micro_batch.rollouts, objective.entropy.coefficient > 0, layout=micro_batch.layout, read=read)
        value, diagnostics = objective(scored.logp, scored.entropy, micro_batch.rollouts, scored.read)
        micro_batch.scored = scored.detached
        return value, (micro_batch, diagnostics)

    # 1. Gradients add up over the micro-batches, and over ranks: the weights of the tokens are those of the whole
    # batch.
    for watcher in watchers:
        watcher.begin(minibatch)
    diagnostics: list[Diagnostics] = []
    for micro_batch, diagnostics_of_micro_batch in policy.compute.gradients(minibatch.micro_batches, forward, machine):
        assert micro_batch.layout is not None and micro_batch.scored is not None
        micro_batch.layout.free()
        if micro_batch.rollouts.old_logp is None:  # π_θ is π_old here: the passes to come compare with it
            micro_batch.rollouts = micro_batch.rollouts.with_columns({"old_logp": micro_batch.scored.logp})
        diagnostics.append(diagnostics_of_micro_batch)
        for watcher in watchers:
            watcher.see(micro_batch)
    # 2. Clip. From here on all is decided and logged from numbers of all ranks, which come from a GPU at once.
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), (grad_clip or math.inf) * machine.scale) / machine.scale
    rank_total = sum(diagnostics[1:], diagnostics[0])
    total, (grad_norm,) = rank_total.reduce(machine.reduce).on_host(sharding.assembled(norm))
    metrics_of_watchers = [watcher.metrics(machine.reduce) for watcher in watchers]
    # 3. Guard: a gradient that is not finite moves nothing, and a stop rule may end the passes.
    is_finite = bool(total.objective.isfinite() & grad_norm.isfinite())
    passes.record(total, is_finite)
    if not total.tokens:  # no rank has a token with weight: Adam's moments stay as they are too
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
    metrics = {**total.metrics(), **objective.entropy.metrics(), "optim/grad_norm": grad_norm}
    if parts.reference is None:
        del metrics["policy/kl_ref"]
    for metrics_of_watcher in metrics_of_watchers:
        metrics |= metrics_of_watcher
    return is_made, metrics
