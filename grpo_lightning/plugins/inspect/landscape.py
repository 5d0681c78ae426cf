"""A token's own objective over its probability, as the run's classes give it while the rest of the completion stays."""

import copy
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.inspect.record import NUM_CURVE

MOST = 2**22
"""The most values that are evaluated of a completion. Of a longer one the tokens that are pushed most have curves."""

Curves = dict[str, Tensor | None]
"""Fields of a `TokenRecord`: [n, ...] over the drawn tokens."""


def curves(objective: Objective, one: Rollouts, logp: Tensor, push: Tensor, after: Tensor) -> Curves:
    """The curves of the tokens of one completion; empty where the surrogate cannot be asked in this way.

    Args:
        objective: That of the run. A copy is evaluated, so state of a surrogate stays.
        one: The completion, with what its last update read.
        logp: [n] float32 log π_θ in that update.
        push: [n] derivative of the objective by it.
        after: [n] float32 log π_θ after the step.
    """
    old = logp if one.old_logp is None else one.old_logp
    marks = [logp, old, after, *([] if one.ref_logp is None else [one.ref_logp])]
    near = surroundings(torch.stack(marks).exp())
    grid = torch.cat([points(torch.tensor([[0.0, 1.0]]).expand(len(logp), 2)), points(near)], dim=1).log()
    # A class of the user's may expect more than copies of a completion. Recording must not end the run.
    with suppress(Exception), torch.no_grad():
        found, clip = _Moved(copy.deepcopy(objective), one, logp, old)(grid, push)
        value, kl = (part - part[:, -1:] for part in found)
        return {
            "near": near,
            "curve": _half(value[:, :-1]),
            "curve_kl": _half(kl[:, :-1]) if objective.beta > 0 else None,
            "bounds": bounds(grid.exp(), clip[:, :-1]),
        }
    return {}


def surroundings(marks: Tensor) -> Tensor:
    """[n, 2] the probabilities around [m, n] those where the policies stand."""
    low, high = marks.amin(0), marks.amax(0)
    margin = 0.6 * torch.maximum(high - low, high / 2).clamp(min=1e-6)
    return torch.stack([(low - margin).clamp(min=0), (high + margin).clamp(max=1)], dim=1)


def points(ends: Tensor) -> Tensor:
    """[n, NUM_CURVE / 2] probabilities from the first to the second of [n, 2], above 0."""
    low, high = ends[:, :1], ends[:, 1:]
    return (low + (high - low) * torch.linspace(0, 1, NUM_CURVE // 2)).maximum((high - low) / 2000)


def bounds(grid: Tensor, clip: Tensor) -> Tensor:
    """[n, 2] probabilities where tokens get to the lower and the upper bound; NaN where that lies outside.

    Args:
        grid: [n, K] probabilities.
        clip: [n, K] int8 there: -1 at the lower bound or target, 1 at the upper, 0 between.
    """
    grid, order = grid.sort(dim=1)
    clip = clip.gather(1, order)
    between = (grid[:, 1:] + grid[:, :-1]) / 2
    found = []
    for side in (-1, 1):
        crossed = (clip[:, 1:] == side) != (clip[:, :-1] == side)
        first = torch.where(crossed, between, torch.inf).amin(1)
        found.append(torch.where(first.isfinite(), first, torch.nan))
    return torch.stack(found, dim=1)


def _half(values: Tensor) -> Tensor:
    return values.clamp(-6e4, 6e4).half()


class _Moved:
    """The terms of the tokens of a completion, each moved alone.

    Args:
        objective: May be changed by being evaluated.
        one: The completion.
        logp: [n] where the others stay.
        old: [n] log π_old.
    """

    def __init__(self, objective: Objective, one: Rollouts, logp: Tensor, old: Tensor) -> None:
        self.objective, self.one, self.logp, self.old = objective, one, logp, old

    def __call__(self, grid: Tensor, push: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """[n, K + 1] surrogate, KL term, and clip at the K log-probs of each token and at its own."""
        n = len(self.logp)
        grid = torch.cat([grid, self.logp[:, None]], dim=1)
        width = grid.shape[1]
        if self._is_alone():
            value, kl, clip = self.at(grid.T)
            return (value.T, kl.T), clip.T
        value, kl = torch.full((2, n, width), torch.nan)
        clip = torch.zeros(n, width, dtype=torch.int8)
        for token in push.abs().argsort(descending=True)[: max(1, MOST // (n * width))].tolist():
            moved = self.logp.repeat(width, 1)
            moved[:, token] = grid[token]
            value[token], kl[token], clip[token] = (part[:, token] for part in self.at(moved))
        return (value, kl), clip

    def at(self, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Surrogate, KL term and clip, [r, n] each, of r copies of the completion with the log-probs [r, n]."""
        rows, one = len(logp), self.one
        several = one.select(torch.zeros(rows, dtype=torch.int64))
        several.old_logp = old = self.old.repeat(rows)
        surrogate = self.objective.surrogate(logp.flatten(), old, several)
        kl = torch.zeros_like(old)
        if self.objective.beta > 0 and one.ref_logp is not None:
            kl = self.objective.kl(logp.flatten(), one.ref_logp.repeat(rows), old)
        clip = surrogate.clipped_high.to(torch.int8) - surrogate.clipped_low.to(torch.int8)
        value, kl, clip = (part.view(rows, -1) for part in (surrogate.value, kl, clip))
        return value, kl, clip

    def _is_alone(self) -> bool:
        """Whether no token's value depends on where the others stand: then all may move at once."""
        is_even = torch.arange(len(self.logp)) % 2 == 0
        moves = [
            self.logp,
            *(torch.where(is_even == even, to, self.logp) for to in (-20.0, 0.0) for even in (True, False)),
        ]
        value, *moved = self.at(torch.stack(moves))[0]
        stay = [~is_even, is_even] * 2
        return all(torch.equal(other[rest], value[rest]) for other, rest in zip(moved, stay, strict=True))
