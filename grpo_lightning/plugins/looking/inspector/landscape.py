"""The objective of a token over its probability, from the run's classes, while the rest of the completion stays."""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.looking.inspector.record import NUM_CURVE

MAX_VALUES = 2**22
"""The most values that are evaluated of a completion; of a longer one the tokens that are pushed most have curves."""

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""From log-probs [r, n] of r copies of a completion to surrogate, KL term and clip, [r, n] each."""


def curves(
    objective: Objective, rollout: Rollouts, logp: Tensor, push: Tensor, after_logp: Tensor
) -> dict[str, Tensor | None]:
    """Returns the curves of the sampled tokens of one completion, [n, ...] by the field of `TokenRecord`.

    There are none if the surrogate cannot evaluate copies of a completion. A copy of the objective is evaluated, so
    the state of a surrogate stays.

    Args:
        objective: The run's objective.
        rollout: The completion, with what the update read.
        logp: [n] log π_θ in the update.
        push: [n] derivative of the objective by each token's log-prob.
        after_logp: [n] log π_θ after the updates.
    """
    old_logp = logp if rollout.old_logp is None else rollout.old_logp
    policies = [logp, old_logp, after_logp, *([] if rollout.ref_logp is None else [rollout.ref_logp])]
    # Half of the points lie around the probabilities where the policies stand.
    low, high = torch.stack(policies).exp().aminmax(dim=0)
    margin = 0.6 * torch.maximum(high - low, high / 2).clamp(min=1e-6)
    near = torch.stack([(low - margin).clamp(min=0), (high + margin).clamp(max=1)], dim=1)
    grid = torch.cat([points(torch.tensor([[0.0, 1.0]]).expand(len(logp), 2)), points(near)], dim=1).log()
    # A class of the user's may expect more than copies of a completion. Recording must not end the run.
    with suppress(Exception), torch.no_grad():
        evaluate = partial(_evaluate, copy.deepcopy(objective), rollout, old_logp)
        *terms, clip = _moved_alone(evaluate, logp, grid, push)
        # Changes, relative to the value at the token's log-prob in the update, which comes last.
        value, kl = (term - term[:, -1:] for term in terms)
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
    crossings = [(clip[:, 1:] == side) != (clip[:, :-1] == side) for side in (-1, 1)]
    lowest = torch.stack([torch.where(crossing, between, torch.inf).amin(1) for crossing in crossings], dim=1)
    return torch.where(lowest.isfinite(), lowest, torch.nan)


def _evaluate(objective: Objective, rollout: Rollouts, old_logp: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_copies = len(logp)
    copies = rollout.select(torch.zeros(num_copies, dtype=torch.int64))
    copies.old_logp = old_logp = old_logp.repeat(num_copies)
    surrogate = objective.surrogate(logp.flatten(), old_logp, copies)
    kl = torch.zeros_like(old_logp)
    if objective.beta > 0 and rollout.ref_logp is not None:
        kl = objective.kl(logp.flatten(), rollout.ref_logp.repeat(num_copies), old_logp)
    clip = surrogate.clipped_high.to(torch.int8) - surrogate.clipped_low.to(torch.int8)
    return surrogate.value.view(num_copies, -1), kl.view(num_copies, -1), clip.view(num_copies, -1)


def _moved_alone(evaluate: Evaluate, logp: Tensor, grid: Tensor, push: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, K + 1] surrogate, KL term and clip of each token at its K log-probs in `grid`, and last at its `logp`.

    The other tokens stay at `logp`.
    """
    num_tokens = len(logp)
    grid = torch.cat([grid, logp[:, None]], dim=1)
    num_points = grid.shape[1]
    if _is_separate(evaluate, logp):
        value, kl, clip = evaluate(grid.T)
        return value.T, kl.T, clip.T

    # Each token moves alone, in `num_points` copies of the completion: those pushed most, as far as the limit goes.
    value, kl = torch.full((2, num_tokens, num_points), torch.nan)
    clip = torch.zeros(num_tokens, num_points, dtype=torch.int8)
    max_tokens = max(1, MAX_VALUES // (num_tokens * num_points))
    for token in push.abs().argsort(descending=True)[:max_tokens].tolist():
        moved = logp.repeat(num_points, 1)
        moved[:, token] = grid[token]
        value[token], kl[token], clip[token] = (term[:, token] for term in evaluate(moved))
    return value, kl, clip


def _is_separate(evaluate: Evaluate, logp: Tensor) -> bool:
    """Returns True if no token's value depends on the others' log-probs: then all may move at once."""
    is_even = torch.arange(len(logp)) % 2 == 0
    # Every other token moves, far down or up; the values of the tokens that stay must not.
    moves = [logp, *(torch.where(is_even == even, to, logp) for to in (-20.0, 0.0) for even in (True, False))]
    value, *moved_values = evaluate(torch.stack(moves))[0]
    stays = [~is_even, is_even] * 2
    return all(torch.equal(moved[stay], value[stay]) for moved, stay in zip(moved_values, stays, strict=True))
