"""One update: when it is accepted, and that it learns what it is shown."""

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from helpers.learning import group, save_policy

from grpo_lightning.plugins.rewards.learned.classifier import RewardModel
from grpo_lightning.plugins.rewards.learned.pairwise_loss import BinaryCrossEntropy, BradleyTerry, RewardLoss, SumOf
from grpo_lightning.plugins.rewards.learned.replay import Batch, LabelledGroup, mixed
from grpo_lightning.plugins.rewards.learned.reward_model_update import Quality, RewardUpdate, Trial, micro_batches


@pytest.fixture
def model(tmp_path: Path) -> RewardModel:
    return RewardModel(str(save_policy(tmp_path)))


def even(count: int, first: int = 0) -> list[LabelledGroup]:
    """Prompts whose completions are right if they end in a letter."""
    return [
        group(f"{number}", 1, 0, 1, 0, completions=[f"{number}a", f"{number}7", f"{number}b", f"{number}8"])
        for number in range(first, first + count)
    ]


def batches(new: list[LabelledGroup], history: Sequence[LabelledGroup] = (), passes: int = 1) -> list[Batch]:
    """Batches of four prompts, a tenth from history."""
    rng = Random(0)
    return [batch for _ in range(passes) for batch in mixed(new, history, 4, 0.1, rng)]


@pytest.mark.parametrize(
    ("new", "old", "bound", "accepted"),
    [
        ((0.8, 0.9), None, 0.0, True),
        ((0.9, 0.8), None, 0.0, False),
        ((0.8, 0.9), (0.9, 0.88), 0.02, True),
        ((0.8, 0.9), (0.9, 0.87), 0.02, False),
        ((0.8, 0.9), (0.9, 0.5), 1.0, True),
        ((0.8, 0.8), (0.9, 0.95), 0.02, False),  # nothing gained, and the loss is the same
        ((0.8, math.nan), None, 0.02, False),
        ((0.8, 0.9), (0.9, math.nan), 0.02, False),
    ],
)
def test_a_candidate_is_accepted_for_a_gain_without_forgetting(new, old, bound: float, accepted: bool):
    def quality(accuracies) -> tuple[Quality, Quality]:
        return Quality(accuracies[0], 0.5), Quality(accuracies[1], 0.5)

    trial = Trial(quality(new), quality(old) if old else None, 0.1)
    assert RewardUpdate(max_forgetting=bound).accepts(trial) == accepted


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), BradleyTerry(), SumOf([BinaryCrossEntropy(), BradleyTerry()])])
def test_it_learns_and_is_accepted(model: RewardModel, loss: RewardLoss):
    update = RewardUpdate(loss, lr=3e-3)
    trial = update(model, batches(even(32), even(8, 100), passes=4), even(6, 50), even(6, 60))
    assert trial.new[0].accuracy == 0.5 and trial.new[1].accuracy > 0.95
    assert trial.old is not None and trial.old[1].accuracy > 0.95
    assert update.accepts(trial) and 0.05 < trial.replayed < 0.15
    assert update.quality(model, even(6, 50)) == trial.new[1]
    assert not model.model.training


def test_what_is_not_accepted_leaves_no_trace(model: RewardModel):
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    wrong = [LabelledGroup(g.prompt, g.completions, g.ended, [1 - label for label in g.labels]) for g in even(8)]
    update = RewardUpdate(lr=3e-3)
    trial = update(model, batches(wrong, passes=2), even(4, 50), [])
    assert not update.accepts(trial) and trial.old is None
    after = model.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_packs_hold_whole_groups_and_do_not_change_the_gradient(
    model: RewardModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model.max_tokens = 40
    divided = [*micro_batches(model, even(16))]
    assert [g for micro_batch, _ in divided for g in micro_batch] == even(16) and len(divided) > 4
    assert all(len(rows) * max(map(len, rows)) <= 40 for _, rows in divided)
    # A step of SGD is the gradient.
    monkeypatch.setattr(torch.optim, "AdamW", lambda p, lr, weight_decay: torch.optim.SGD(p, lr))
    whole = RewardModel(str(tmp_path))
    update = RewardUpdate(SumOf([BinaryCrossEntropy(), BradleyTerry()]), lr=1.0)
    update.train(model, [(even(16), 0)])
    update.train(whole, [(even(16), 0)])
    found, expected = model.model.score.weight.detach(), whole.model.score.weight.detach()
    assert float(found.abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
