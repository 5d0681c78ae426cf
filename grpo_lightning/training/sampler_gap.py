"""Compares the log-probs of sampler and policy: checks the engine, and computes the metrics under mismatch/."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grpo_lightning.grpo.step import MicroBatch, Minibatch, Parts
from grpo_lightning.grpo.update import Watcher
from grpo_lightning.maths.mismatch import FAR, Mismatch
from grpo_lightning.types import UsageError

LOGP_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1.0, torch.bfloat16: 1.0}
"""Gap of one token, in nats, above which the run warns, by the dtype of the engine's products.

A gap of 0.3 is usual in bfloat16."""
MEAN_FRACTION = 0.12
"""Mean gap above which an engine with its own weights stops the run, as a fraction of the tolerance: 3 x measured."""
FAR_FRACTION = 0.01
"""Fraction of tokens with a gap over 1 nat above which such an engine stops the run too.

Some such tokens are normal: in a mixture of experts rounding may send a token to another expert."""
ALARM = 5.0
"""Factor by which the mean gap may grow since it was first measured. Above it, the engine's weights are outdated."""
ALARM_FLOOR = 0.01
"""Mean gap that is never an alarm, as a fraction of the tolerance."""


class SamplerGap(Watcher):
    """Compares the log-probs of sampler and policy in one update.

    Args:
        parts: The parts of the run: engine, policy and correction.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._gaps: list[Tensor] = []
        self._mismatches: list[Mismatch] = []

    def begin(self, minibatch: Minibatch) -> None:
        engine = self.parts.explorer.engine
        is_first_update = not minibatch.step.passes.updates
        sampler_is_policy = minibatch.step.exploration.sampler_is_policy

        # A filter such as top-p makes the sampler another policy on purpose: that is no gap.
        self._should_match = minibatch.on_policy and sampler_is_policy

        # A step's mismatch is measured in its first update, unless sampler and policy make the same computation.
        product_dtype = engine.product_dtype(self.parts.policy)
        is_low_precision = product_dtype not in (torch.float32, torch.float64)
        has_policy_weights = minibatch.on_policy and engine.shares_weights
        may_differ = self.parts.objective.correction.reads_sampler or is_low_precision or not has_policy_weights
        self._measures_mismatch = is_first_update and sampler_is_policy and may_differ

    def see(self, micro_batch: MicroBatch) -> None:
        rollouts = micro_batch.rollouts
        assert micro_batch.scored is not None and rollouts.old_logp is not None
        logp = micro_batch.scored.logp
        if self._measures_mismatch:
            factor = self.parts.objective.factor(rollouts.old_logp, rollouts)
            self._mismatches.append(Mismatch.from_micro_batch(rollouts, logp, factor))

        # -inf: there is no gap to measure. An idle micro-batch, which has no weight, holds no sampled token.
        gap = torch.full((), -math.inf, device=logp.device)
        if rollouts.sampler_logp is not None:
            gap = torch.where(rollouts.weight.any(), (logp - rollouts.sampler_logp).abs().max(), gap)
        self._gaps.append(gap)

    def metrics(self, reduce: Callable[..., Any]) -> Mapping[str, Tensor]:
        """Returns the metrics of the update, and checks the engine.

        A single token beyond the tolerance only warns: the more tokens there are, the larger is the largest gap.

        Raises:
            UsageError: An engine with its own weights samples from another policy.
        """
        mismatch = None
        if self._mismatches:
            mismatch = sum(self._mismatches[1:], self._mismatches[0]).reduce(reduce)
        largest_gap = reduce(torch.stack(self._gaps).max(), reduce_op="max").cpu()
        metrics = {} if mismatch is None else mismatch.metrics()
        if not self._should_match or largest_gap == -math.inf:
            return metrics

        engine = self.parts.explorer.engine
        tolerance = LOGP_TOLERANCE[engine.product_dtype(self.parts.policy)]
        if mismatch is not None and not engine.shares_weights:
            self._check_weights(mismatch, tolerance)
        if largest_gap > tolerance:
            rank_zero_warn(
                f"the sampler's and the policy's log-probs of the same tokens differ by up to {largest_gap:.2g} "
                f"before the first update (expected: at most {tolerance:g}): "
                "perhaps the engine does not sample from this policy. See policy/logp_gap"
            )
        return metrics | {"policy/logp_gap": largest_gap}

    def _check_weights(self, mismatch: Mismatch, tolerance: float) -> None:
        """Raises UsageError if the engine's copy of the weights is wrong from the beginning, or outdated."""
        engine = self.parts.explorer.engine
        mean_gap, far_fraction = mismatch.gaps()
        is_far = far_fraction > FAR_FRACTION and tolerance <= FAR
        if mean_gap > MEAN_FRACTION * tolerance or is_far:
            gap_causes = getattr(engine, "gap_causes", "")
            causes = f". {gap_causes}" if gap_causes else ""
            raise UsageError(
                f"model.engine={type(engine).__name__}: "
                f"the sampler's and the policy's log-probs of the same tokens differ by {mean_gap:.2g} nats on average"
                f", and {far_fraction:.1%} of them by over 1 nat, before the first update "
                f"(expected: at most {MEAN_FRACTION * tolerance:.2g} and {FAR_FRACTION:.0%}): "
                "the engine does not sample from this policy. "
                f"See policy/logp_gap, or use model.engine=NativeEngine{causes}"
            )

        # Rounding makes about the same gap at each step. A gap that grows comes from weights of an earlier policy.
        if engine.first_gap is None:
            engine.first_gap = mean_gap
        if mean_gap > max(ALARM * engine.first_gap, ALARM_FLOOR * tolerance):
            raise UsageError(
                f"model.engine={type(engine).__name__}: "
                f"the sampler's and the policy's log-probs of the same tokens differ by {mean_gap:.2g} nats on average"
                f", after {engine.first_gap:.2g} at first (expected: at most {ALARM:g} times as much): "
                "its weights fall behind. See policy/logp_gap"
            )
