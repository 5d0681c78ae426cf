"""From explored completions to minibatches: log-probs, advantages, weights, and packs of few tokens."""

from collections.abc import Callable, Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.ragged import segment_sum, segments, take
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.weightings import BatchSize
from grpo_lightning.training.minibatch import idle_pack, moving_rows
from grpo_lightning.training.module import GRPOModule

Rows = Tensor
"""[r] int64, some rows of the rollouts."""


class Preparation:
    """Makes one step's rollouts ready for the passes. Every rank does the same number of forwards.

    The packs of the updates are cut first, and log π_old is computed on those very packs: in bfloat16 a log-prob
    depends on what else is in its pack, and a ratio should be 1 while nothing has been learned. Rollouts stay on the
    CPU; packs go to the device.

    Args:
        module: Its policy, snapshots, advantage and objective are used.
        strategy: Of the trainer, for sums over ranks.
        max_tokens: Tokens in one forward.
        spare: This rank's explored rollouts, at least one row: what it passes when it has nothing else to do.
    """

    def __init__(self, module: GRPOModule, strategy: Strategy, max_tokens: int, spare: Rollouts) -> None:
        self.module = module
        self.strategy = strategy
        self.max_tokens = max_tokens
        self.idle = idle_pack(spare).to(module.device)

    def cut(
        self, rollouts: Rollouts, rewards: RewardBatch, minibatch: Tensor, num_minibatches: int, mu: int
    ) -> list[list[Rollouts]]:
        """The packs of each minibatch on the device, with all that the updates read.

        Args:
            rollouts: Of this rank.
            rewards: Of the same completions.
            minibatch: [B] the minibatch each completion belongs to; groups are whole.
            num_minibatches: How many there are.
            mu: How often each is learned from.
        """
        self._add_entropy_rank(rollouts)
        # A KL penalty in the reward needs log-probs first.
        if self.module.reward_kl is None:
            self._add_advantage(rollouts, rewards)
        cut = [self._cut(rollouts, minibatch == number) for number in range(num_minibatches)]
        on_policy = self._add_logp(rollouts, cut, one_update=num_minibatches == mu == 1)
        if self.module.reward_kl is not None:
            self._add_advantage(rollouts, rewards)
        if len(rollouts):
            self.module.objective.surrogate.prepare(rollouts)
        found = []
        for number, rows in enumerate(cut):
            packs = [rollouts.select(chosen).to(self.module.device) for chosen in rows]
            for pack in packs if number < on_policy else ():
                pack.old_logp = None
            found.append(packs + [self.idle] * (self._most(len(packs)) - len(packs)))
        return found

    def _add_entropy_rank(self, rollouts: Rollouts) -> None:
        """Every token's rank by entropy among those of all ranks, where a mask reads it."""
        module = self.module
        if any(mask.reads_entropy for mask in module.objective.masks):
            packs = rollouts.packs(self.max_tokens, module.policy.shares_prefix)
            entropy = self._per_token(rollouts, packs, lambda pack: module.policy(pack).entropy)
            everyone = torch.cat(ranks.gather(entropy)).sort().values
            rollouts.entropy_rank = torch.searchsorted(everyone, entropy) / len(everyone)

    def _cut(self, rollouts: Rollouts, chosen: Tensor) -> list[Rows]:
        """The rows of each pack of one minibatch; sets the weights of its tokens."""
        module = self.module
        rows = chosen.nonzero().squeeze(1)
        share = rollouts.select(rows)
        local = torch.tensor([len(share), len(share.prompt_lengths), share.num_tokens], device=module.device)
        sequences, groups, tokens = self.strategy.reduce(local, reduce_op="sum").tolist()
        if not len(share):
            return []
        size = BatchSize(sequences, groups, tokens, module.sampling.max_new_tokens)
        share.weight = module.objective.token_weight(share, size)
        rollouts.weight[take(rows, rollouts.lengths)] = share.weight
        if module.objective.learns_from_advantage_alone and module.reward_kl is None:
            moving = moving_rows(share)
            rows, share = rows[moving], share.select(moving)
        return [rows[pack] for pack in share.packs(self.max_tokens, module.policy.shares_prefix)]

    def _add_logp(self, rollouts: Rollouts, cut: Sequence[Sequence[Rows]], one_update: bool) -> int:
        """log π_old and log π_ref of every token, each only where something reads it.

        The first update finds π_θ at π_old, so log π_old need not be known there: the update notes it for the others.

        Returns:
            The number of minibatches for whose first update that is so: 1 or 0.
        """
        module = self.module
        old_policy, reference = module.old_policy, module.reference
        packs = [pack for minibatch in cut for pack in minibatch]
        if reference is not None:
            rollouts.ref_logp = self._per_token(rollouts, packs, lambda pack: reference(module.policy, pack))
        needed_first = module.objective.surrogate.reads_old_logp or module.reward_kl is not None
        on_policy = int(old_policy.is_policy)
        if one_update and on_policy and not needed_first:
            return 1
        if needed_first:
            # Rows that no update learns from count too.
            left = torch.ones(len(rollouts), dtype=torch.bool)
            left[torch.cat([torch.empty(0, dtype=torch.int64), *packs])] = False
            rest = left.nonzero().squeeze(1)
            more = rollouts.select(rest).packs(self.max_tokens, module.policy.shares_prefix) if len(rest) else []
            packs += [rest[pack] for pack in more]
        else:
            packs = [pack for minibatch in cut[on_policy:] for pack in minibatch]
        # A compiled forward with gradients may round differently from one without.
        with torch.set_grad_enabled(module.policy.compile_model):
            rollouts.old_logp = self._per_token(rollouts, packs, lambda pack: old_policy(module.policy, pack).detach())
        return on_policy

    def _per_token(self, rollouts: Rollouts, packs: Sequence[Rows], of: Callable[[Rollouts], Tensor]) -> Tensor:
        """[N] what `of` finds pack by pack, back in the rollouts' order; 0 where no pack is."""
        found = torch.zeros(rollouts.num_tokens, dtype=torch.float32)
        # Asked first: ranks with sharded weights meet in every forward.
        idle = self._most(len(packs)) - len(packs)
        for rows in packs:
            pack = rollouts.select(rows)
            found[take(rows, rollouts.lengths)] = of(pack.to(self.module.device)).cpu()
        for _ in range(idle):
            of(self.idle)
        return found

    def _add_advantage(self, rollouts: Rollouts, rewards: RewardBatch) -> None:
        """Line 9: Â of every token, from the rewards of all ranks."""
        penalty = self.module.reward_kl
        if penalty is not None:
            assert rollouts.old_logp is not None and rollouts.ref_logp is not None
            per_token = penalty.kl(rollouts.old_logp, rollouts.ref_logp, rollouts.old_logp).double()
            per_row = segment_sum(per_token, segments(rollouts.lengths), len(rollouts))
            rewards = rewards.plus(per_row, -penalty.beta)
        everyone = ranks.gather(rewards)
        tokens = [int(batch.lengths.sum()) for batch in everyone]
        advantage = self.module.advantage.per_token(RewardBatch.concat(everyone))
        rollouts.advantage = advantage.split(tokens)[self.module.trainer.global_rank]

    def _most(self, count: int) -> int:
        """The largest `count` of all ranks."""
        return int(self.strategy.reduce(torch.tensor(count, device=self.module.device), reduce_op="max"))
