"""Checks for rollouts of an earlier policy, and for what reads the log-probs that their engine recorded."""

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.corrections import Correction
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.snapshots import PolicySnapshot
from grpo_lightning.types import UsageError


def check_late(old_policy: PolicySnapshot, correction: Correction, sampling: Sampling) -> None:
    """Raises UsageError for options that do not go with rollouts of an earlier policy."""
    if old_policy.is_proximal:
        return
    if not sampling.unfiltered:
        raise UsageError(
            "model.sampling: set top_k=0, top_p=1 and min_p=0 with a loop.source whose rollouts are of an earlier "
            "policy; their recorded log-probs are log π_old, which a filter changes"
        )
    if correction.reads_sampler:
        raise UsageError(
            f"model.objective.correction={type(correction).__name__}: set model.old_policy=Proximal "
            "with a loop.source whose rollouts are of an earlier policy, or correction=NoCorrection; else their "
            "recorded log-probs are log π_old, and every factor is 1"
        )


def check_recorded(
    rollouts: Rollouts, is_late: bool, old_policy: PolicySnapshot, correction: Correction, sampling: Sampling
) -> None:
    """Raises UsageError where something reads log-probs that no engine recorded, or that a filter changed."""
    if is_late:
        check_late(old_policy, correction, sampling)
    is_missing = rollouts.sampler_logp is None and len(rollouts) > 0
    if is_missing and correction.reads_sampler:
        raise UsageError(
            f"model.objective.correction={type(correction).__name__}: the engine recorded no log-probs to compare "
            "with; use an engine that does, or NoCorrection"
        )
    if is_missing and is_late and not old_policy.is_proximal:
        raise UsageError(
            "the rollouts are of an earlier policy, and their engine recorded no log-probs: use an engine that "
            "does, or a source whose rollouts are of the policy as it is"
        )
