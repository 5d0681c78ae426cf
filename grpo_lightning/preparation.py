"""From explored completions to minibatches: log-probs, advantages, weights, and packs of few tokens."""

from collections.abc import Callable

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.minibatch import idle_pack, without_idle_rows
from grpo_lightning.module import GRPOModule
from grpo_lightning.ragged import segment_sum, segments, take
from grpo_lightning.reward_batch import RewardBatch
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.weightings import BatchSize


class Preparation:
    """Makes one step's rollouts ready for the passes. Every rank does the same number of forwards.

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
        self.idle = idle_pack(spare)

    def add_logp(self, rollouts: Rollouts, one_update: bool) -> None:
        """log π_old and log π_ref of every token, and its rank by entropy, each only where something reads it.

        With one update a step π_θ is π_old in it, so the ratio is 1 and log π_old need not be known.
        """
        module, temperature = self.module, self.module.sampling.temperature
        old_policy, reference = module.old_policy, module.reference
        if not one_update or module.objective.surrogate.reads_old_logp or module.reward_kl is not None:
            rollouts.old_logp = self._per_token(rollouts, lambda pack: old_policy(module.policy, pack, temperature))
        if reference is not None:
            rollouts.ref_logp = self._per_token(rollouts, lambda pack: reference(module.policy, pack, temperature))
        if any(mask.reads_entropy for mask in module.objective.masks):
            entropy = self._per_token(rollouts, lambda pack: module.policy(pack, temperature).entropy)
            everyone = torch.cat(ranks.gather(entropy.cpu())).sort().values.to(entropy.device)
            rollouts.entropy_rank = torch.searchsorted(everyone, entropy) / len(everyone)

    def _per_token(self, rollouts: Rollouts, of: Callable[[Rollouts], Tensor]) -> Tensor:
        """[N] what `of` finds pack by pack, back in the rollouts' order."""
        found = torch.empty(rollouts.num_tokens, dtype=torch.float32, device=rollouts.lengths.device)
        packs = rollouts.packs(self.max_tokens, self.module.policy.shares_prefix)
        # Asked first: ranks with sharded weights meet in every forward.
        idle = self._most(len(packs)) - len(packs)
        for rows in packs:
            found[take(rows, rollouts.lengths)] = of(rollouts.select(rows))
        for _ in range(idle):
            of(self.idle)
        return found

    def add_advantage(self, rollouts: Rollouts, rewards: RewardBatch) -> None:
        """Line 9: Â of every token, from the rewards of all ranks."""
        penalty = self.module.reward_kl
        if penalty is not None:
            assert rollouts.old_logp is not None and rollouts.ref_logp is not None
            per_token = penalty.kl(rollouts.old_logp, rollouts.ref_logp, rollouts.old_logp).double()
            per_row = segment_sum(per_token, segments(rollouts.lengths), len(rollouts))
            rewards = rewards.plus(per_row.cpu(), -penalty.beta)
        everyone = ranks.gather(rewards)
        tokens = [int(batch.lengths.sum()) for batch in everyone]
        advantage = self.module.advantage.per_token(RewardBatch.concat(everyone))
        mine = advantage.split(tokens)[self.module.trainer.global_rank]
        rollouts.advantage = mine.to(rollouts.lengths.device)

    def minibatches(self, rollouts: Rollouts, minibatch: Tensor, num_minibatches: int) -> list[list[Rollouts]]:
        """The packs of each minibatch, with the weight of every token in its update.

        Args:
            rollouts: With advantages and log-probs.
            minibatch: [B] the minibatch each completion belongs to; groups are whole.
            num_minibatches: How many there are.
        """
        objective = self.module.objective
        found = []
        for number in range(num_minibatches):
            share = rollouts.select((minibatch == number).nonzero().squeeze(1))
            local = torch.tensor([len(share), len(share.prompt_lengths), share.num_tokens], device=self.module.device)
            total = self.strategy.reduce(local, reduce_op="sum").tolist()
            packs = []
            if len(share):
                share.weight = objective.token_weight(share, BatchSize(*total))
                if objective.learns_from_advantage_alone:
                    share = without_idle_rows(share)
                packs = share.split(self.max_tokens, self.module.policy.shares_prefix)
            found.append(packs + [self.idle] * (self._most(len(packs)) - len(packs)))
        return found

    def _most(self, count: int) -> int:
        """The largest `count` of all ranks."""
        return int(self.strategy.reduce(torch.tensor(count, device=self.module.device), reduce_op="max"))
