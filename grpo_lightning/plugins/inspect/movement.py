"""Whether a step's updates moved the log-probs of its tokens as their advantages ask: the metrics under `update/`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.maths.objective import Objective
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.results import Scores
from grpo_lightning.training.step import Step

METRICS = ("update/agreement", "update/delta_logp_right", "update/delta_logp_wrong")


@dataclass(slots=True)
class Movement:
    """Sums over the tokens that an update was made with, so that packs and ranks add up.

    An update that a stop rule refused, or that was skipped as not finite, does not count.
    """

    push: float = 0.0
    """|weight * Â|."""
    agreeing: float = 0.0
    """|weight * Â| of the tokens whose log-prob moved as Â asks."""
    right: float = 0.0
    """log π_θ after the updates less log π_old, over tokens of right completions."""
    num_right: float = 0.0
    wrong: float = 0.0
    """The same of wrong completions."""
    num_wrong: float = 0.0

    @classmethod
    def from_step(cls, step: Step, policy: Policy, objective: Objective) -> "Movement":
        """The movement on all ranks together; a forward per pack.

        Every rank must call it, in eval mode and without gradients.

        Args:
            step: Its updates have been made, its packs are still there.
            policy: π_θ after the updates.
            objective: That of the updates.
        """
        total = torch.zeros(6, dtype=torch.float64)
        for pack in (pack for packs in step.packs for pack in packs):
            after = policy(pack).logp
            policy.free_masks(pack)
            if not pack.updated or int(pack.row[0]) < 0:
                continue  # nothing was learned from it, or it is idle
            assert pack.old_logp is not None
            value = pack.spread(_right(step.exploration.scores, pack.row.tolist()).to(after.device))
            weight = objective.corrected_weight(pack.old_logp, pack)
            total += _sums(weight * pack.advantage, after - pack.old_logp, value, weight != 0).cpu()
        everyone = ranks.gather(total)
        return cls(*sum(everyone[1:], everyone[0]).tolist())

    def metrics(self) -> dict[str, float]:
        """The metrics by name, without those that are not defined."""
        sums = (self.agreeing, self.push), (self.right, self.num_right), (self.wrong, self.num_wrong)
        return {name: total / count for name, (total, count) in zip(METRICS, sums, strict=True) if count}


def _sums(push: Tensor, change: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """[6] the fields of `Movement`, from [N] numbers of a pack; `right` is NaN where nobody knows."""
    return torch.stack(
        [
            push.abs().sum(),
            push.abs()[change * push > 0].sum(),
            change[counts & (right == 1)].sum(),
            (counts & (right == 1)).sum().float(),
            change[counts & (right == 0)].sum(),
            (counts & (right == 0)).sum().float(),
        ]
    )


def _right(scores: Scores, rows: Sequence[int]) -> Tensor:
    """[B] 1 for right completions, 0 for wrong ones, NaN where the reward that decides failed."""
    values = torch.tensor([scores.main.value[row] for row in rows], dtype=torch.float32)
    return torch.where(values.isnan(), values, (values > RIGHT_ABOVE).float())
