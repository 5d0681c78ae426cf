"""What a completion's last update saw of it: the terms of the objective, token by token."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.ragged import take
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.training.step import Step


@dataclass(slots=True)
class Learned:
    """One completion in the forward of the last update that saw it. [n] each, over its drawn tokens."""

    update: int
    """The update's index in the step."""
    rollouts: Rollouts
    """The completion, with what the update read."""
    logp: Tensor
    """float32 log π_θ."""
    entropy: Tensor
    """float32."""
    surrogate: Tensor
    """float32 value of the surrogate."""
    kl: Tensor
    """float32 estimate of KL(π_θ || π_ref); 0 without a reference."""
    correction: Tensor | None
    """float32 factor of the weight for the mismatch of sampler and policy; None without a correction."""
    push: Tensor
    """float32 derivative of the objective by log π_θ."""
    clip: Tensor
    """int8: -1 at the lower bound or target, 1 at the upper, 0 between, or where nothing pushes."""

    def is_of(self, rollouts: Rollouts) -> bool:
        """Whether it is of this completion, among the pieces of one conversation."""
        pairs = [(getattr(self.rollouts, name), getattr(rollouts, name)) for name in ("token_ids", "context_ids")]
        return all(own is other if own is None or other is None else torch.equal(own, other) for own, other in pairs)


def learned_from(
    step: Step, rows: Collection[int], objective: Objective, num_minibatches: int
) -> dict[int, list[Learned]]:
    """What the step's updates saw of the completions `rows`, by their index in the exploration, piece by piece.

    An update that was refused by a stop rule, or skipped as not finite, counts: its objective is logged.
    Completions that no update saw are missing: they have no advantage, or a stop rule came before them.

    Args:
        step: Its updates have been made, its packs are still there.
        rows: Indices into the exploration's samples.
        objective: That of the run.
        num_minibatches: Updates of one pass.
    """
    found: dict[int, list[Learned]] = {}
    last = len(step.passes.updates) - 1
    for minibatch, packs in enumerate(step.packs):
        update = last - (last - minibatch) % num_minibatches
        for pack in packs:
            if pack.scored is not None:
                for index, row in enumerate(pack.row.tolist()):
                    if row in rows:
                        found.setdefault(row, []).append(_look(pack, index, objective, update))
    return found


def _look(pack: Rollouts, index: int, objective: Objective, update: int) -> Learned:
    row = torch.tensor([index], device=pack.lengths.device)
    tokens = take(row, pack.lengths)
    logp, entropy = pack.scored.logp[tokens].cpu(), pack.scored.entropy[tokens].cpu()
    one = pack.select(row).to("cpu")
    with torch.enable_grad():
        leaf = logp.clone().requires_grad_()
        terms = objective.terms(leaf, entropy, one)
        old_logp = logp if one.old_logp is None else one.old_logp
        weight = objective.corrected_weight(old_logp, one)
        (push,) = torch.autograd.grad((weight * terms.total).sum(), leaf)
    pushes = (weight != 0) & (one.advantage != 0)
    clip = terms.surrogate.clipped_high.to(torch.int8) - terms.surrogate.clipped_low.to(torch.int8)
    return Learned(
        update,
        one,
        logp,
        entropy,
        surrogate=terms.surrogate.value.detach(),
        kl=terms.kl.detach(),
        correction=objective.factor(old_logp, one),
        push=push,
        clip=torch.where(pushes, clip, 0),
    )
