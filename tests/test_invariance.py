"""Execution never changes the gradient: token budget, row order, padding, ranks.

The policy's weights are about as large as a new model's. Ten times larger ones make the float32 gradient itself
inexact: then it is 1e-6 away from the float64 one, whichever way it is computed.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fitting import Gradients, fit, relative
from tiny import gradients, policy_of, rollouts_of

from grpo_lightning.objective import Objective
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.surrogates import Clipped
from grpo_lightning.weightings import FixedLength, SequenceMean, TokenMean, TokenWeighting

WEIGHTINGS = [SequenceMean(), TokenMean(), FixedLength(12)]


def gradient_of_fit(folder: Path, **arguments) -> dict[str, torch.Tensor]:
    seen = Gradients()
    fit(folder, [seen], trainer={"max_epochs": 1}, **arguments)
    assert len(seen.updates) == 1
    return seen.updates[0]


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("max_tokens", [1, 40, 100])
def test_the_token_budget_does_not_change_the_gradient(
    tmp_path: Path, weighting: TokenWeighting, max_tokens: int
) -> None:
    whole, parts = (
        gradient_of_fit(
            tmp_path / name, loop={"max_tokens": budget}, objective=Objective(beta=0.1, weighting=weighting)
        )
        for name, budget in (("whole", 0), ("parts", max_tokens))
    )
    assert relative(parts, whole) < 1e-6


def test_row_order_and_padding_do_not_change_the_gradient() -> None:
    policy, rollouts = policy_of(scale=0.05), rollouts_of([5, 1, 9, 3, 7, 2], prompt_lengths=[4, 2])
    objective = Objective(surrogate=Clipped(), beta=0.1)

    def gradient(packs: list[Rollouts]) -> dict[str, torch.Tensor]:
        policy.zero_grad()
        for pack in packs:
            scored = policy(pack)
            objective(scored.logp, scored.entropy, pack)[0].backward()
        return dict(gradients(policy))

    order = torch.tensor([4, 0, 5, 2, 1, 3])
    whole = gradient([rollouts])
    assert relative(gradient([rollouts.select(order)]), whole) < 1e-6
    # Alone, a row has no padding at all.
    assert relative(gradient([rollouts.select(torch.tensor([row])) for row in range(6)]), whole) < 1e-6


def test_two_ranks_have_the_gradient_of_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("gradient_of_ranks.py")
    for ranks in (1, 2):
        subprocess.run(
            [sys.executable, script, str(ranks), str(tmp_path)], check=True, capture_output=True, timeout=240
        )
    one, two = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    assert len(one) == len(two) == 4
    for a, b in zip(two, one, strict=True):
        assert relative(a, b) < 1e-6
