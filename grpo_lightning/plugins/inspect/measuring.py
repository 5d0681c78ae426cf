"""Passes without gradients over a step's completions: every rank makes the same number of forwards."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.grpo.step import Step
from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.inspect.record import NUM_ALTERNATIVES
from grpo_lightning.policy.packer import Packer
from grpo_lightning.policy.policy import Policy, TokenLogp


class Measure:
    """Measures completions with the policy as it is. Call it in eval mode, without gradients, on every rank."""

    def __init__(self, policy: Policy, max_tokens: int, device: torch.device) -> None:
        self.policy = policy
        self.max_tokens = max_tokens
        self.device = device

    def __call__(self, rollouts: Rollouts) -> TokenLogp:
        """Log-probs, entropies and the likeliest tokens at each drawn token, on the CPU, in the order of `rollouts`."""
        packer, packs = self._packs(rollouts)
        # `trainer.precision: 64-true` changes the default type.
        numbers = torch.zeros(rollouts.num_tokens, 2 + NUM_ALTERNATIVES, dtype=torch.float32)
        ids = torch.zeros(rollouts.num_tokens, NUM_ALTERNATIVES, dtype=torch.int64)
        for tokens, scored in packer.over(rollouts, packs, partial(self.policy, num_top=NUM_ALTERNATIVES)):
            assert scored.top_ids is not None and scored.top_logp is not None
            numbers[tokens] = torch.column_stack([scored.logp, scored.entropy, scored.top_logp]).cpu()
            ids[tokens] = scored.top_ids.cpu()
        return TokenLogp(numbers[:, 0], numbers[:, 1], ids, numbers[:, 2:])

    def logp(self, rollouts: Rollouts, of: Callable[[Policy, Rollouts], Tensor]) -> Tensor:
        """[N] float32 log-probs of a snapshot, on the CPU."""
        packer, packs = self._packs(rollouts)
        return packer.per_token(rollouts, packs, partial(of, self.policy))

    def _packs(self, rollouts: Rollouts) -> tuple[Packer, list[Tensor]]:
        packer = Packer(self.policy, self.max_tokens, rollouts.temperature)
        return packer, packer.rows_of_packs(rollouts) if len(rollouts) else []


METRICS = ("update/agreement", "update/delta_logp_right", "update/delta_logp_wrong")


def movement(step: Step, policy: Policy, objective: Objective) -> dict[str, float]:
    """The metrics of all ranks together, without those that are not defined; a forward per pack.

    They are over the tokens that an update was made with: one that a stop rule refused, or that was skipped as not
    finite, does not count. Every rank must call it, in eval mode and without gradients.
    """
    # For each metric a sum and what it is divided by.
    total = torch.zeros(3, 2, dtype=torch.float64)
    value = step.exploration.scores.main.value
    for pack in (pack for packs in step.packs for pack in packs):
        rollouts, layout = pack.rollouts, pack.layout or policy.compute.layout(pack.rollouts)
        after = policy(rollouts, layout=layout).logp
        layout.free()
        if not pack.updated or pack.is_idle:
            continue  # nothing was learned from it, or it is idle
        assert rollouts.old_logp is not None
        change = after - rollouts.old_logp
        weight = rollouts.weight * objective.factor(rollouts.old_logp, rollouts)
        push, counts = weight * rollouts.advantage, weight != 0
        total[0] += torch.stack([push.abs()[change * push > 0].sum(), push.abs().sum()]).cpu()
        # NaN, where the reward that decides failed, is neither right nor wrong.
        judged = rollouts.spread(torch.tensor([value[row] for row in rollouts.row.tolist()], device=after.device))
        for index, own in ((1, judged > RIGHT_ABOVE), (2, judged <= RIGHT_ABOVE)):
            total[index] += torch.stack([change[counts & own].sum(), (counts & own).sum()]).cpu()
    everyone = ranks.gather(total)
    sums = sum(everyone[1:], everyone[0]).tolist()
    return {name: total / count for name, (total, count) in zip(METRICS, sums, strict=True) if count}
