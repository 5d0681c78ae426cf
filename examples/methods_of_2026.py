"""Your paper in ten lines: eleven methods of 2025 and 2026, each one class in a seam of the framework.

    grpo fit --config grpo_lightning:quickstart --model.objective.surrogate methods_of_2026.UP

from this folder, or with it on PYTHONPATH. `tests/test_methods_of_2026.py` holds them to the contracts.
"""

from collections import defaultdict
from math import comb
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import (
    AdvantageEstimator,
    Clipped,
    Correction,
    EntropyBonus,
    RewardBatch,
    Rollouts,
    Surrogate,
    SurrogateResult,
    TokenMask,
    gathered,
    log_ratio,
    pad,
    per_element,
    rank_in_step,
    segment_sum,
    segments,
    starts,
)
from grpo_lightning.maths.advantages import centred, quotient


class UP(Surrogate):
    """UP-GRPO: good tokens without a bound, Â π_θ / sg(π_θ); bad ones clipped on both sides (arXiv 2607.06987)."""

    def __init__(self, clip: float = 0.2, dual_clip: float = 3.0) -> None:
        self.bad = Clipped(clip, clip, dual_clip)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        result, good = self.bad(logp, old_logp, rollouts), rollouts.advantage > 0
        free = rollouts.advantage * (logp - logp.detach()).exp()
        none = torch.zeros_like(good)
        high = result.clipped_high & ~good
        return SurrogateResult(torch.where(good, free, result.value), result.clipped_low, high, none)


class FIPO(Surrogate):
    """FIPO: the clipped ratio with Â f_t, f_t = clip(exp(Σ_{k>=t} γ^(k-t) Δ log p_k), 1, 1 + reach) (arXiv 2603.19835).

    A token counts more where what followed it has become likelier; γ = 2^(-1 / half_life).
    """

    def __init__(self, half_life: float = 32.0, reach: float = 0.2) -> None:
        self.gamma, self.reach, self.clipped = 2 ** (-1 / half_life), reach, Clipped()

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        change, lengths = log_ratio(logp.detach(), old_logp), rollouts.lengths
        future = pad(change, lengths)
        for t in reversed(range(future.shape[1] - 1)):
            future[:, t] += self.gamma * future[:, t + 1]
        inside = pad(torch.ones_like(change), lengths) > 0
        factor = future[inside].exp().clamp(1.0, 1.0 + self.reach)
        result = self.clipped(logp, old_logp, rollouts)
        result.value = factor * result.value
        return result


class ClipCov(Surrogate):
    """Clip-Cov: no gradient for a fraction of the tokens, of those with the largest covariance (arXiv 2505.22617).

    The covariance of a token is (Â - mean Â)(log π_old - its mean) over the step; such tokens cost the entropy.
    The paper takes a random part of those within bounds at each update, this the top at the first.
    """

    reads_old_logp = True

    def __init__(self, fraction: float = 2e-4) -> None:
        self.fraction, self.clipped = fraction, Clipped()

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        return {"covariance_rank": rank_in_step(covariance(rollouts))}

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        result = self.clipped(logp, old_logp, rollouts)
        top = rollouts.columns["covariance_rank"] >= 1 - self.fraction
        result.value = torch.where(top, result.value.detach(), result.value)
        return result


class KLCov(ClipCov):
    """KL-Cov: those tokens keep Â r, with a penalty on |log(π_θ/π_old)| in place of the clip (arXiv 2505.22617)."""

    def __init__(self, fraction: float = 2e-3, beta: float = 1.0) -> None:
        super().__init__(fraction)
        self.clipped, self.beta = Clipped(None, None), beta

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        result = self.clipped(logp, old_logp, rollouts)
        top = (rollouts.columns["covariance_rank"] >= 1 - self.fraction) & (rollouts.advantage != 0)
        result.value = result.value - torch.where(top, self.beta * log_ratio(logp, old_logp).abs(), 0.0)
        return result


def covariance(rollouts: Rollouts) -> Tensor:
    """[N] (Â - mean Â)(log π_old - mean log π_old), the means over the tokens of all ranks."""
    assert rollouts.old_logp is not None
    advantage, logp = rollouts.advantage, rollouts.old_logp
    return (advantage - gathered(advantage).mean()) * (logp - gathered(logp).mean())


class DRO(Surrogate):
    """DRO: Â log π_θ - β/2 log²(π_θ/π_old): a squared penalty, without advantage too (arXiv 2405.19107; verl)."""

    moves_without_advantage = True

    def __init__(self, beta: float = 0.01) -> None:
        self.beta = beta

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        penalty = self.beta / 2 * log_ratio(logp, old_logp).square()
        return SurrogateResult.unbounded(rollouts.advantage * logp - penalty)


class M2PO(Correction):
    """M2PO: leaves out the tokens with the largest log²(π_old/μ), until the mean of the others is at most τ.

    A bound on the second moment over the batch, for rollouts that are many updates old (arXiv 2510.01161).
    """

    reads_old_logp = True

    def __init__(self, tau: float = 0.04) -> None:
        self.tau = tau

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        assert rollouts.old_logp is not None
        sampler_logp = rollouts.old_logp if rollouts.sampler_logp is None else rollouts.sampler_logp
        square = log_ratio(rollouts.old_logp, sampler_logp).square()
        squares = gathered(square).sort().values
        mean = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
        largest = squares[mean <= self.tau].max() if (mean <= self.tau).any() else torch.tensor(-1.0)
        return {"m2po": (square <= largest).float()}

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return log_ratio.exp() * rollouts.columns["m2po"]


class GTPO(TokenMask):
    """GTPO: a token at the same place, from the start or the end, of a good and a bad completion is in conflict.

    There bad completions are not pushed down (factor 0), and good ones count twice (arXiv 2508.03772; without its
    filter by entropy). Only an unbroken run of such tokens counts.
    """

    def __call__(self, rollouts: Rollouts) -> Tensor:
        factor, ids, advantage = torch.ones_like(rollouts.advantage), rollouts.token_ids.tolist(), rollouts.advantage
        begin, lengths, group = starts(rollouts.lengths).tolist(), rollouts.lengths.tolist(), rollouts.group.tolist()
        signs: dict[tuple[int, int, int, int], set[float]] = defaultdict(set)
        rows = [range(b, b + n) for b, n in zip(begin, lengths, strict=True)]
        sides = [(side, g, row[:: (1, -1)[side]]) for side in (0, 1) for g, row in zip(group, rows, strict=True)]
        for side, g, row in sides:
            for t, index in enumerate(row):
                signs[side, g, t, ids[index]].add(float(advantage[index].sign()))
        for side, g, row in sides:
            for t, index in enumerate(row):
                if not {1.0, -1.0} <= signs[side, g, t, ids[index]]:
                    break
                factor[index] = 2.0 if advantage[index] > 0 else 0.0
        return factor


class TOPD(AdvantageEstimator):
    """TOP-D: a return of dense rewards from a teacher, r_t = log(α T/π + 1 - α), by token (arXiv 2607.04751).

    The return is r_t plus the mean of the later ones, less its mean over the group's tokens, divided by their std.
    T is `model.reference`, π the old policy. The reward of the task does not enter.
    """

    reads = ("old_logp", "ref_logp")

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = alpha

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return torch.zeros_like(reward)

    def per_token(self, rewards: RewardBatch) -> Tensor:
        ratio = log_ratio(rewards.columns["ref_logp"], rewards.columns["old_logp"]).exp().double()
        dense, lengths = (self.alpha * ratio + 1 - self.alpha).log(), rewards.lengths
        row, ends = segments(lengths), lengths.cumsum(0)
        summed = dense.cumsum(0)
        later = summed[ends - 1][row] - summed  # of the tokens that follow
        count = ends[row] - 1 - torch.arange(len(row))
        value, group = dense + later / count.clamp(min=1), rewards.group[row]
        num = int(group.max()) + 1 if len(group) else 0
        count = segment_sum(torch.ones_like(value), group, num).clamp(min=1)
        value = value - (segment_sum(value, group, num) / count)[group]
        std = (segment_sum(value.square(), group, num) / count).sqrt()[group]
        return (value / (std + 1e-6)).float()


class OPO(AdvantageEstimator):
    """OPO: Â_i = r_i - sum_j |o_j| r_j / sum_j |o_j| over the group (arXiv 2505.23585).

    The baseline of least variance where a completion's gradient is as large as its length, as it is with `TokenMean`
    and `Unweighted`. For strictly on-policy steps, without a KL term.
    """

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """Of completions of one length, whose baseline is the mean."""
        return centred(reward, group, num_groups)[0]

    def per_token(self, rewards: RewardBatch) -> Tensor:
        valid, advantage = ~rewards.total.isnan(), torch.zeros_like(rewards.total)
        group, length = rewards.group[valid], rewards.lengths[valid].double()
        if valid.any():
            # From deviations, so that a group without spread has exactly 0.
            count = int(group.max()) + 1
            deviation, _ = centred(rewards.total[valid], group, count)
            baseline = segment_sum(length * deviation, group, count) / segment_sum(length, group, count).clamp(min=1)
            advantage[valid] = deviation - baseline[group]
        return per_element(advantage.float(), rewards.lengths)


class PassAtK(AdvantageEstimator):
    """Pass@k training: the credit of a completion in sets of k, not alone (arXiv 2508.10751, analytical derivation).

    A set of k completions is worth its largest reward. Â_i = (mean of the sets that hold i - mean of all sets) / (std
    of all sets + eps), over all sets of the group. Once one answer is right, other right ones add nothing: it pays for
    what the group lacks, where GRPO makes the likely answer surer.

    Args:
        k: Completions in a set, less than G: in a smaller group all but one. `k: 1` is `GroupStd` of the population.
        advantage_eps: Added to the standard deviation.
    """

    def __init__(self, k: int = 4, advantage_eps: float = 1e-6) -> None:
        self.k, self.advantage_eps = k, advantage_eps

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        deviation, _ = centred(reward, group, num_groups)
        advantage = torch.zeros_like(reward)
        for index in group.unique().tolist():
            rows = (group == index).nonzero().squeeze(1)
            order = rows[deviation[rows].argsort(stable=True)]
            advantage[order] = self.of_group(deviation[order])
        return advantage

    def of_group(self, value: Tensor) -> Tensor:
        """[n] advantages from [n] rewards in ascending order."""
        n = len(value)
        if n == 1 or not value.any():
            return torch.zeros_like(value)
        k = min(self.k, n - 1)
        # The fraction of sets whose largest is j; of the sets with i, the fractions whose largest is i, and j above i.
        largest = value.new_tensor([comb(j, k - 1) / comb(n, k) for j in range(n)])
        equal = value.new_tensor([comb(i, k - 1) / comb(n - 1, k - 1) for i in range(n)])
        above = value.new_tensor([comb(j - 1, k - 2) / comb(n - 1, k - 1) if j and k > 1 else 0.0 for j in range(n)])
        higher = (above * value).flip(0).cumsum(0).flip(0) - above * value
        mean = (largest * value).sum()
        std = (largest * (value - mean).square()).sum().sqrt()
        return quotient(equal * value + higher - mean, std + self.advantage_eps)


class LinearEntropy(EntropyBonus):
    """c goes in a line from `first` to `last` over a number of updates, and stays there.

    For exploration early in a run, without noise at its end.

    Args:
        first: c of the first update.
        last: c after `updates` of them.
        updates: Number of optimizer updates.
    """

    def __init__(self, first: float = 0.01, last: float = 0.0, updates: int = 1000) -> None:
        self.first, self.last, self.updates, self.made = first, last, updates, 0

    @property
    def coefficient(self) -> float:
        return self.first + (self.last - self.first) * min(self.made / self.updates, 1.0)

    def observe(self, entropy: float) -> None:
        self.made += 1

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]
