"""The gap between the sampler's log-probs and the policy's: a check of the engine, and the metrics under mismatch/."""

import math
from collections.abc import Callable, Mapping
from functools import reduce as folded
from operator import add
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grpo_lightning.grpo.step import Minibatch, Pack, Parts
from grpo_lightning.grpo.update import Watcher
from grpo_lightning.maths.mismatch import FAR, Mismatch
from grpo_lightning.types import UsageError

LOGP_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1.0, torch.bfloat16: 1.0}
"""Gap of one token in nats beyond which the run warns, by the type of the products. In bfloat16 0.3 is usual."""
MEAN_FRACTION = 0.12  # of the above: mean gap beyond which an engine with its own weights stops the run, 3 x measured
ALARM, ALARM_FLOOR = 5.0, 0.01  # times the first mean gap, and of the tolerance: beyond both, weights are old
FAR_FRACTION = 0.01  # of tokens off by over 1 nat beyond which it stops too: a router may send some to another expert


class SamplerGap(Watcher):
    """Compares the log-probs of sampler and policy in one update."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._gaps: list[Tensor] = []
        self._mismatches: list[Mismatch] = []

    def begin(self, minibatch: Minibatch) -> None:
        engine, exploration = self.parts.explorer.engine, minibatch.step.exploration
        # A filter makes the sampler another policy on purpose; that is no mismatch.
        self._comparable = minibatch.on_policy and exploration.sampler_is_policy
        rounds = engine.product_dtype(self.parts.policy) not in (torch.float32, torch.float64)
        corrects = self.parts.objective.correction.reads_sampler
        may_differ = corrects or rounds or not (minibatch.on_policy and engine.shares_weights)
        # In a step's first update, as all ranks see it.
        self._differs = not minibatch.step.passes.updates and exploration.sampler_is_policy and may_differ

    def see(self, pack: Pack) -> None:
        rollouts = pack.rollouts
        assert pack.scored is not None and rollouts.old_logp is not None
        logp = pack.scored.logp
        gap = torch.full((), -math.inf, device=logp.device)
        if self._differs:
            factor = self.parts.objective.factor(rollouts.old_logp, rollouts)
            self._mismatches.append(Mismatch.from_pack(rollouts, logp, factor))
        if rollouts.sampler_logp is not None:
            # No sampler drew the token of an idle pack, which has no weight.
            gap = torch.where(rollouts.weight.any(), (logp - rollouts.sampler_logp).abs().max(), gap)
        self._gaps.append(gap)

    def metrics(self, reduce: Callable[..., Any]) -> Mapping[str, Tensor]:
        """Raises UsageError where an engine with its own weights draws from another policy.

        A single token beyond the tolerance warns. The more tokens there are, the further off is the worst of them.
        """
        mismatch = folded(add, self._mismatches).reduce(reduce) if self._mismatches else None
        gap = reduce(torch.stack(self._gaps).max(), reduce_op="max").cpu()
        metrics = {} if mismatch is None else mismatch.metrics()
        if not self._comparable or gap == -math.inf:
            return metrics
        engine = self.parts.explorer.engine
        tolerance = LOGP_TOLERANCE[engine.product_dtype(self.parts.policy)]
        mean, far = (0.0, 0.0) if mismatch is None else mismatch.gaps()
        too_far = far > FAR_FRACTION and tolerance <= FAR
        differ = "the sampler's and the policy's log-probs of the same tokens differ by"
        when = "before the first update (expected: at most"
        which = "the engine does not draw from this policy. See policy/logp_gap"
        if not engine.shares_weights and (mean > MEAN_FRACTION * tolerance or too_far):
            causes = f". {engine.gap_causes}" if engine.gap_causes else ""
            raise UsageError(
                f"model.engine={type(engine).__name__}: {differ} {mean:.2g} nats on average, and {far:.1%} of them by "
                f"over 1 nat, {when} {MEAN_FRACTION * tolerance:.2g} and {FAR_FRACTION:.0%}): {which}, or use "
                f"model.engine=NativeEngine{causes}"
            )
        if mismatch is not None and not engine.shares_weights:
            engine.first_gap = first = mean if engine.first_gap is None else engine.first_gap
            if mean > max(ALARM * first, ALARM_FLOOR * tolerance):
                raise UsageError(
                    f"model.engine={type(engine).__name__}: {differ} {mean:.2g} nats on average, after {first:.2g} at "
                    f"first (expected: at most {ALARM:g} times as much): its weights fall behind. See policy/logp_gap"
                )
        if gap > tolerance:
            rank_zero_warn(f"{differ} up to {gap:.2g} {when} {tolerance:g}): perhaps {which}")
        return metrics | {"policy/logp_gap": gap}
