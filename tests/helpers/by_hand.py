"""Surrogates on a few tokens whose numbers are given."""

import torch
from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from helpers.tiny import rollouts_of


def value_and_gradient(
    member: Surrogate, logp: Tensor, old_logp: Tensor, rollouts: Rollouts
) -> tuple[SurrogateResult, Tensor]:
    """The result, and d(sum of values)/dlogp."""
    logp = logp.clone().requires_grad_()
    result = member(logp, old_logp, rollouts)
    (gradient,) = torch.autograd.grad(result.value.sum(), logp)
    result.value = result.value.detach()
    return result, gradient


def by_hand(
    member: Surrogate, lengths: list[int], advantage: list[float], ratio: list[float], old: float | list[float] = 0.1
) -> tuple[SurrogateResult, Tensor]:
    """Completions with an advantage each, and the ratio of each token; π_old is `old`."""
    rollouts = rollouts_of(lengths)
    rollouts.advantage = torch.tensor(advantage).repeat_interleave(rollouts.lengths)
    old_logp = (torch.tensor(old) * torch.ones(sum(lengths))).log()
    return value_and_gradient(member, old_logp + torch.tensor(ratio).log(), old_logp, rollouts)


def rollouts_with(completions: list[list[int]], advantage: list[float], old: list[float] | None = None) -> Rollouts:
    """One group; an advantage for each completion, π_old for each token."""
    rollouts = Rollouts.from_lists([[1]], [0] * len(completions), completions)
    rollouts.advantage = torch.tensor(advantage).repeat_interleave(rollouts.lengths)
    rollouts.old_logp = torch.tensor(old or [0.1] * rollouts.num_tokens).log()
    return rollouts
