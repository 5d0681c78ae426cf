"""The curve of a token's objective is what the run's own classes give with this token elsewhere."""

from collections.abc import Callable

import pytest
import torch
from helpers.contracts import SURROGATES
from helpers.tiny import rollouts_of
from torch import Tensor

from grpo_lightning import K2, Clipped, Objective, Rollouts, Surrogate, SurrogateResult
from grpo_lightning.plugins.looking.inspector import landscape
from grpo_lightning.plugins.looking.inspector.landscape import curves, points


class Own(Surrogate):
    """A surrogate of a user's: a token's value depends on the one before it, and on how often it was asked."""

    asked = 0

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        self.asked += 1
        return SurrogateResult.unbounded(rollouts.advantage * (logp + logp.roll(1) / 2).exp())


def completion(surrogate: Surrogate, length: int = 9) -> tuple[Rollouts, Tensor]:
    """One completion, and log π_θ near log π_old."""
    whole = rollouts_of([length, 3], prompt_lengths=[3], seed=1)
    whole.add_columns(surrogate.prepare(whole))
    one = whole.select(torch.tensor([0]))
    return one, (one.old_logp + 0.2 * torch.randn(length)).clamp(max=-1e-3)


@pytest.mark.parametrize("make", [*SURROGATES.values(), Own], ids=[*SURROGATES, "Own"])
def test_the_curve_is_the_objective_with_this_token_elsewhere(make: Callable[[], Surrogate]) -> None:
    surrogate = make()
    objective = Objective(surrogate, K2(), beta=0.5)
    one, logp = completion(surrogate)
    found = curves(objective, one, logp, torch.ones_like(logp), logp)
    assert getattr(surrogate, "asked", 0) == 0  # a copy was
    near, curve, kl = found["near"], found["curve"], found["curve_kl"]
    grid = torch.cat([points(torch.tensor([[0.0, 1.0]]).expand(9, 2)), points(near)], dim=1).log()
    base = objective.surrogate(logp, one.old_logp, one).value
    for token in range(9):
        for point in range(0, grid.shape[1], 3):
            moved = logp.clone()
            moved[token] = grid[token, point]
            value = objective.surrogate(moved, one.old_logp, one).value[token] - base[token]
            torch.testing.assert_close(curve[token, point].float(), value, rtol=2e-3, atol=1e-4)
    expected = objective.kl(grid, one.ref_logp[:, None], one.old_logp[:, None])
    expected -= objective.kl(logp, one.ref_logp, one.old_logp)[:, None]
    torch.testing.assert_close(kl.float(), expected, rtol=2e-3, atol=1e-4)


def test_bounds_by_hand() -> None:
    """A good token of probability 0.5 is at the upper bound above 0.6, a bad one at the lower below 0.4."""
    one, _ = completion(Clipped())
    one.advantage = torch.tensor([1.0, -1.0, 0.0] * 3)
    one.old_logp = logp = torch.full((9,), 0.5).log()
    found = curves(Objective(Clipped(0.2, 0.2)), one, logp, logp, logp)["bounds"]
    # Half the distance of two points: the marks are at 0.5, so points are dense from 0.35 to 0.65.
    assert found[0, 1] == pytest.approx(0.6, abs=0.01) and found[1, 0] == pytest.approx(0.4, abs=0.01)
    assert found[0, 0].isnan() and found[1, 1].isnan() and found[2].isnan().all()


def test_in_a_long_completion_the_hardest_pushed_tokens_have_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landscape, "MAX_VALUES", 2 * 9 * 41)
    one, logp = completion(Own())
    push = torch.tensor([0.0, 5, 0, -7, 1, 0, 0, 0, 0])
    curve = curves(Objective(Own()), one, logp, push, logp)["curve"]
    assert curve.isfinite().all(1).nonzero().flatten().tolist() == [1, 3]
    # Of a surrogate over single tokens all have, however long.
    assert curves(Objective(), one, logp, push, logp)["curve"].isfinite().all()  # type: ignore[union-attr]


class Fussy(Surrogate):
    """Takes no other log-probs than those of its run."""

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        raise RuntimeError("not these")


def test_a_surrogate_that_cannot_evaluate_copies_has_no_curve() -> None:
    one, logp = completion(Clipped())
    assert curves(Objective(Fussy()), one, logp, logp, logp) == {}
