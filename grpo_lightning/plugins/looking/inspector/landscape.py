"""A token's own objective over its probability, as the run's classes give it while the rest of the completion stays."""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.looking.inspector.record import NUM_CURVE

MOST = 2**22
"""The most values that are evaluated of a completion. Of a longer one the tokens that are pushed most have curves."""

At = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Surrogate, KL term and clip, [r, n] each, of r copies of a completion with the log-probs [r, n]."""


def curves(objective: Objective, one: Rollouts, logp: Tensor, push: Tensor, after: Tensor) -> dict[str, Tensor | None]:
    """The curves of the drawn tokens of one completion, [n, ...] by the field of `TokenRecord`.

    They are empty where the surrogate cannot be asked in this way. A copy of the objective is evaluated, so state of a
    surrogate stays.
    """
    old = logp if one.old_logp is None else one.old_logp
    marks = [logp, old, after, *([] if one.ref_logp is None else [one.ref_logp])]
    # Around the probabilities where the policies stand.
    low, high = torch.stack(marks).exp().aminmax(dim=0)
    margin = 0.6 * torch.maximum(high - low, high / 2).clamp(min=1e-6)
    near = torch.stack([(low - margin).clamp(min=0), (high + margin).clamp(max=1)], dim=1)
    grid = torch.cat([points(torch.tensor([[0.0, 1.0]]).expand(len(logp), 2)), points(near)], dim=1).log()
    # A class of the user's may expect more than copies of a completion. Recording must not end the run.
    with suppress(Exception), torch.no_grad():
        *found, clip = _moved_alone(partial(_at, copy.deepcopy(objective), one, old), logp, grid, push)
        value, kl = (part - part[:, -1:] for part in found)
        return {
            "near": near,
            "curve": value[:, :-1].clamp(-6e4, 6e4).half(),
            "curve_kl": kl[:, :-1].clamp(-6e4, 6e4).half() if objective.beta > 0 else None,
            "bounds": bounds(grid.exp(), clip[:, :-1]),
        }
    return {}


def points(ends: Tensor) -> Tensor:
    """[n, NUM_CURVE / 2] probabilities from the first to the second of [n, 2], above 0."""
    low, high = ends[:, :1], ends[:, 1:]
    return (low + (high - low) * torch.linspace(0, 1, NUM_CURVE // 2)).maximum((high - low) / 2000)


def bounds(grid: Tensor, clip: Tensor) -> Tensor:
    """[n, 2] probabilities where tokens get to the lower and the upper bound; NaN where that lies outside."""
    grid, order = grid.sort(dim=1)
    clip = clip.gather(1, order)
    between = (grid[:, 1:] + grid[:, :-1]) / 2
    crossed = [(clip[:, 1:] == side) != (clip[:, :-1] == side) for side in (-1, 1)]
    first = torch.stack([torch.where(one, between, torch.inf).amin(1) for one in crossed], dim=1)
    return torch.where(first.isfinite(), first, torch.nan)


def _at(objective: Objective, one: Rollouts, old: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(logp)
    several = one.select(torch.zeros(rows, dtype=torch.int64))
    several.old_logp = old = old.repeat(rows)
    surrogate = objective.surrogate(logp.flatten(), old, several)
    kl = torch.zeros_like(old)
    if objective.beta > 0 and one.ref_logp is not None:
        kl = objective.kl(logp.flatten(), one.ref_logp.repeat(rows), old)
    clip = surrogate.clipped_high.to(torch.int8) - surrogate.clipped_low.to(torch.int8)
    return surrogate.value.view(rows, -1), kl.view(rows, -1), clip.view(rows, -1)


def _moved_alone(at: At, logp: Tensor, grid: Tensor, push: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, K + 1] surrogate, KL term and clip of each token at its K log-probs in `grid`, and last at its own.

    The other tokens stay at `logp`.
    """
    n = len(logp)
    grid = torch.cat([grid, logp[:, None]], dim=1)
    width = grid.shape[1]
    if _is_separate(at, logp):
        value, kl, clip = at(grid.T)
        return value.T, kl.T, clip.T
    value, kl = torch.full((2, n, width), torch.nan)
    clip = torch.zeros(n, width, dtype=torch.int8)
    for token in push.abs().argsort(descending=True)[: max(1, MOST // (n * width))].tolist():
        moved = logp.repeat(width, 1)
        moved[:, token] = grid[token]
        value[token], kl[token], clip[token] = (part[:, token] for part in at(moved))
    return value, kl, clip


def _is_separate(at: At, logp: Tensor) -> bool:
    """True where no token's value depends on the others' log-probs: then all may move at once."""
    is_even = torch.arange(len(logp)) % 2 == 0
    moves = [logp, *(torch.where(is_even == even, to, logp) for to in (-20.0, 0.0) for even in (True, False))]
    value, *moved = at(torch.stack(moves))[0]
    stay = [~is_even, is_even] * 2
    return all(torch.equal(other[rest], value[rest]) for other, rest in zip(moved, stay, strict=True))
