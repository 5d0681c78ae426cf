"""From explored completions to minibatches: log-probs, advantages, weights, and packs of few tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.advantages import AdvantageEstimator
from grpo_lightning.maths.kl_penalty import KLPenalty
from grpo_lightning.maths.masks import ENTROPY_RANK
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.ragged import segment_sum, segments, take
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.weightings import BatchSize
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import PolicySnapshot
from grpo_lightning.training.packs import idle_pack, moving_rows
from grpo_lightning.types import UsageError

T = TypeVar("T")

Rows = Tensor
"""[r] int64, some rows of the rollouts."""


class Preparation:
    """Makes one step's rollouts ready for the passes. Every rank makes the same number of forwards.

    The packs of the updates are cut first, and log π_old is computed on those very packs. In bfloat16 a log-prob
    depends on what else is in its pack, and a ratio should be 1 while nothing has been learned. Rollouts stay on the
    CPU; packs go to the device.

    Args:
        policy: π_θ.
        objective: Its surrogate, masks and weighting are used.
        advantage: Â from the rewards.
        old_policy: π_old, for rollouts that π_θ has drawn; if it is proximal, for all.
        reference: π_ref; None computes no log-probs of it.
        reward_kl: A KL penalty in the reward; it needs a reference.
        max_tokens: Tokens in one forward; 0 sets no limit.
        max_length: Tokens of the longest completion that can be drawn, which some weightings divide by.
        device: Where the policy is.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        advantage: AdvantageEstimator,
        old_policy: PolicySnapshot,
        reference: PolicySnapshot | None,
        reward_kl: KLPenalty | None,
        max_tokens: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.advantage = advantage
        self.old_policy = old_policy
        self.reference = reference
        self.reward_kl = reward_kl
        self.max_tokens = max_tokens
        self.max_length = max_length
        self.device = device

    def cut(
        self, rollouts: Rollouts, rewards: RewardBatch, minibatch: Tensor, num_minibatches: int, mu: int, version: int
    ) -> list[list[Rollouts]]:
        """The packs of each minibatch on the device, with all that the updates read.

        Every rank gets as many packs as the others, one at least: idle ones fill up.

        Args:
            rollouts: Of this rank. What is computed for each token is also written into them.
            rewards: Of the same completions.
            minibatch: [B] int64, the minibatch of each completion; groups are whole. See `minibatch_of_rows`.
            num_minibatches: How many there are, over all ranks.
            mu: How often each is learned from.
            version: `Policy.version` of the weights that drew the rollouts.

        Raises:
            UsageError: Nothing recorded the rollouts' log-probs, and they are of an earlier version, or a correction
                needs them.
        """
        self._refuse_unknown_sampler(rollouts)
        idle = idle_pack(rollouts.temperature).to(self.device)
        self._add_entropy_rank(rollouts, idle)
        # A KL penalty in the reward needs log-probs first.
        if self.reward_kl is None:
            self._add_advantage(rollouts, rewards)
        cut = [self._cut(rollouts, minibatch == index) for index in range(num_minibatches)]
        self._add_ref_logp(rollouts, cut, idle)
        fresh = version == self.policy.version
        unknown = self._add_old_logp(rollouts, cut, idle, fresh, one_update=num_minibatches == mu == 1)
        if self.reward_kl is not None:
            self._add_advantage(rollouts, rewards)
        if len(rollouts):
            rollouts.add_columns(self.objective.surrogate.prepare(rollouts))
        # Of all ranks: one without completions has prepared nothing.
        columns = {name for names in ranks.gather([*rollouts.columns]) for name in names}
        idle.add_columns(dict.fromkeys(columns, torch.zeros_like(idle.weight)))
        found = []
        for index, rows in enumerate(cut):
            packs = [rollouts.select(chosen).to(self.device) for chosen in rows]
            for pack in packs if index < unknown else ():
                pack.old_logp = None
            found.append(packs + [idle] * (max(1, most(len(packs))) - len(packs)))
        return found

    def _refuse_unknown_sampler(self, rollouts: Rollouts) -> None:
        correction = self.objective.correction
        if correction.reads_sampler and rollouts.sampler_logp is None and len(rollouts):
            raise UsageError(
                f"model.objective.correction={type(correction).__name__}: the engine recorded no log-probs to compare "
                "with; use an engine that does, or NoCorrection"
            )

    def _add_entropy_rank(self, rollouts: Rollouts, idle: Rollouts) -> None:
        """Every token's rank by entropy among those of all ranks, where a mask reads it."""
        if any(mask.reads_entropy for mask in self.objective.masks):
            packs = self._packs(rollouts)
            entropy = self._per_token(rollouts, packs, idle, lambda pack: self.policy(pack).entropy)
            everyone = torch.cat(ranks.gather(entropy)).sort().values
            rollouts.add_columns({ENTROPY_RANK: torch.searchsorted(everyone, entropy) / len(everyone)})

    def _cut(self, rollouts: Rollouts, chosen: Tensor) -> list[Rows]:
        """The rows of each pack of one minibatch; sets the weights of its tokens."""
        rows = chosen.nonzero().squeeze(1)
        part = rollouts.select(rows)
        sizes = ranks.gather((int(part.begins.sum()), len(part.prompt_lengths), part.num_tokens))
        if not len(part):
            return []
        sequences, groups, tokens = map(sum, zip(*sizes, strict=True))
        part.weight = self.objective.token_weight(part, BatchSize(sequences, groups, tokens, self.max_length))
        rollouts.weight[take(rows, rollouts.lengths)] = part.weight
        if self.objective.learns_from_advantage_alone and self.reward_kl is None:
            moving = moving_rows(part)
            rows, part = rows[moving], part.select(moving)
        return [rows[pack] for pack in self._packs(part)]

    def _add_ref_logp(self, rollouts: Rollouts, cut: Sequence[Sequence[Rows]], idle: Rollouts) -> None:
        """log π_ref of every token, where there is a reference."""
        reference = self.reference
        if reference is not None:
            packs = [pack for minibatch in cut for pack in minibatch]
            rollouts.ref_logp = self._per_token(rollouts, packs, idle, lambda pack: reference(self.policy, pack))

    def _add_old_logp(
        self, rollouts: Rollouts, cut: Sequence[Sequence[Rows]], idle: Rollouts, fresh: bool, one_update: bool
    ) -> int:
        """log π_old of every token, where something reads it.

        Rollouts of an earlier version bring it along: it is what their sampler recorded. For fresh ones, and where
        π_old is proximal, the first update finds π_θ at π_old. So it need not be known there; the update notes it for
        the others.

        Returns:
            The number of minibatches for whose first update it stays unknown: 1 or 0.
        """
        if not (fresh or self.old_policy.is_proximal):
            if rollouts.sampler_logp is None and len(rollouts):
                raise UsageError(
                    "the rollouts are of an earlier policy, and their engine recorded no log-probs: use an engine that "
                    "does, or a source whose rollouts are of the policy as it is"
                )
            rollouts.old_logp = torch.zeros(0) if rollouts.sampler_logp is None else rollouts.sampler_logp
            return 0
        packs = [pack for minibatch in cut for pack in minibatch]
        needed_first = self.objective.surrogate.reads_old_logp or self.reward_kl is not None
        unknown = int(self.old_policy.is_policy)
        if one_update and unknown and not needed_first:
            return 1
        if needed_first:
            # Rows that no update learns from count too.
            left = torch.ones(len(rollouts), dtype=torch.bool)
            left[torch.cat([torch.empty(0, dtype=torch.int64), *packs])] = False
            rest = left.nonzero().squeeze(1)
            more = self._packs(rollouts.select(rest)) if len(rest) else []
            packs += [rest[pack] for pack in more]
        else:
            packs = [pack for minibatch in cut[unknown:] for pack in minibatch]
        # A compiled forward with gradients may round differently from one without.
        with torch.set_grad_enabled(self.policy.compile_model):
            rollouts.old_logp = self._per_token(
                rollouts, packs, idle, lambda pack: self.old_policy(self.policy, pack).detach()
            )
        return unknown

    def _packs(self, rollouts: Rollouts) -> list[Rows]:
        return rollouts.rows_of_packs(self.max_tokens, self.policy.shares_prefix)

    def _per_token(
        self, rollouts: Rollouts, packs: Sequence[Rows], idle: Rollouts, function: Callable[[Rollouts], Tensor]
    ) -> Tensor:
        """[N] what `function` returns pack by pack, in the order of the rollouts; 0 where no pack is."""
        found = torch.zeros(rollouts.num_tokens, dtype=torch.float32)
        for tokens, values in over_packs(rollouts, packs, idle, self.device, function):
            found[tokens] = values.cpu()
        return found

    def _add_advantage(self, rollouts: Rollouts, rewards: RewardBatch) -> None:
        """Line 9: Â of every token, from the rewards of all ranks."""
        if self.reward_kl is not None:
            assert rollouts.old_logp is not None and rollouts.ref_logp is not None
            per_token = self.reward_kl.kl(rollouts.old_logp, rollouts.ref_logp, rollouts.old_logp).double()
            per_completion = segment_sum(per_token, segments(rewards.lengths), len(rewards.lengths))
            rewards = rewards.plus(per_completion, -self.reward_kl.beta)
        everyone = ranks.gather(rewards)
        tokens = [int(batch.lengths.sum()) for batch in everyone]
        advantage = self.advantage.per_token(RewardBatch.concat(everyone))
        rollouts.advantage = advantage.split(tokens)[ranks.rank()]


def minibatch_of_rows(prompt_ids: Sequence[int], num_minibatches: int) -> Tensor:
    """[B] int64, the minibatch of each row: the prompts of all ranks, in order of their ids, are cut into equal parts.

    Every rank must call it. So each minibatch holds the same prompts for any number of ranks.

    Args:
        prompt_ids: [B] the id of each row's prompt, on this rank.
        num_minibatches: How many minibatches there are.
    """
    everyone = sorted({id for ids in ranks.gather({*prompt_ids}) for id in ids})
    minibatch = {id: index * num_minibatches // len(everyone) for index, id in enumerate(everyone)}
    return torch.tensor([minibatch[id] for id in prompt_ids], dtype=torch.int64)


def over_packs(
    rollouts: Rollouts,
    packs: Sequence[Rows],
    idle: Rollouts,
    device: torch.device,
    function: Callable[[Rollouts], T],
) -> Iterator[tuple[Tensor, T]]:
    """For each pack the indices of its tokens, and what `function` returns for it. Every rank calls it as often.

    Args:
        rollouts: What the packs are rows of.
        packs: The rows of each.
        idle: What ranks with fewer packs call `function` with.
        device: Where packs are moved to.
        function: Makes a forward.
    """
    # Asked first: ranks with sharded weights meet in every forward.
    num_idle = most(len(packs)) - len(packs)
    for rows in packs:
        yield take(rows, rollouts.lengths), function(rollouts.select(rows).to(device))
    for _ in range(num_idle):
        function(idle)


def most(count: int) -> int:
    """The largest `count` of all ranks. Every rank must call it."""
    return max(ranks.gather(count))
