"""One update: when it is accepted, and that it learns what it is shown."""

import math
from pathlib import Path
from random import Random

import pytest
import torch
from helpers.labelled_groups import group
from helpers.tiny import model_of, tokenizer

from grpo_lightning.plugins.learned.labelled import LabelledGroup
from grpo_lightning.plugins.learned.loss import BinaryCrossEntropy, BradleyTerry, RewardLoss, SumOf
from grpo_lightning.plugins.learned.model import RewardModel
from grpo_lightning.plugins.learned.update import Quality, RewardUpdate, Trial, packs


@pytest.fixture
def model(tmp_path: Path) -> RewardModel:
    model_of("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return RewardModel(str(tmp_path))


def even(count: int, first: int = 0) -> list[LabelledGroup]:
    """Prompts whose completions are right if they end in a letter."""
    return [
        group(f"{number}", 1, 0, 1, 0, completions=[f"{number}a", f"{number}7", f"{number}b", f"{number}8"])
        for number in range(first, first + count)
    ]


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

    assert Trial(quality(new), quality(old) if old else None, 0.1).accepts(bound) == accepted


def test_a_gain_can_be_asked_for_and_forgone():
    better, worse = (
        Trial((Quality(0.8, 0.5), Quality(0.85, 0.9)), None, 0),
        Trial((Quality(0.8, 0.5), Quality(0.1, 0.9)), None, 0),
    )
    assert better.accepts(1.0, 0.04) and not better.accepts(1.0, 0.06)
    assert worse.accepts(1.0, -1.0) and not worse.accepts(1.0)


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), BradleyTerry(), SumOf([BinaryCrossEntropy(), BradleyTerry()])])
def test_it_learns_and_is_accepted(model: RewardModel, loss: RewardLoss):
    update = RewardUpdate(loss, replay=0.1, num_passes=4, batch_size=4, lr=3e-3)
    trial = update(model, even(32), even(8, 100), even(6, 50), even(6, 60), 0.02, 0.0, Random(0))
    assert trial.new[0].accuracy == 0.5 and trial.new[1].accuracy > 0.95
    assert trial.old is not None and trial.old[1].accuracy > 0.95
    assert trial.accepts(0.02) and 0.05 < trial.replayed < 0.15
    assert update.quality(model, even(6, 50)) == trial.new[1]
    assert not model.model.training


def test_what_is_not_accepted_leaves_no_trace(model: RewardModel):
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    wrong = [LabelledGroup(g.prompt, g.completions, g.ended, [1 - label for label in g.labels]) for g in even(8)]
    trial = RewardUpdate(BinaryCrossEntropy(), 0.0, 2, 4, 3e-3)(model, wrong, [], even(4, 50), [], 0.02, 0.0, Random(0))
    assert not trial.accepts(0.02) and trial.old is None
    after = model.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_packs_hold_whole_groups_and_do_not_change_the_gradient(
    model: RewardModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model.max_tokens = 40
    divided = [*packs(model, even(16))]
    assert [g for pack, _ in divided for g in pack] == even(16) and len(divided) > 4
    assert all(len(rows) * max(map(len, rows)) <= 40 for _, rows in divided)
    # A step of SGD is the gradient.
    monkeypatch.setattr(torch.optim, "AdamW", lambda p, lr, weight_decay: torch.optim.SGD(p, lr))
    whole = RewardModel(str(tmp_path))
    update = RewardUpdate(SumOf([BinaryCrossEntropy(), BradleyTerry()]), 0.0, 1, 16, 1.0)
    update.train(model, even(16), [], Random(0))
    update.train(whole, even(16), [], Random(0))
    found, expected = model.model.score.weight.detach(), whole.model.score.weight.detach()
    assert float(found.abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
