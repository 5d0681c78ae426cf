import torch
from helpers.tiny import rollouts_of

from grpo_lightning.maths.filters import Truncated
from grpo_lightning.plugins.methods.token_weights.top_entropy import TopEntropy


def test_truncated_leaves_out_whole_completions_by_hand():
    rollouts = rollouts_of([2, 1, 3])
    rollouts.truncated = torch.tensor([False, True, False])
    assert Truncated()(rollouts).tolist() == [True, True, False, True, True, True]
    rollouts.truncated = torch.zeros(3, dtype=torch.bool)
    assert Truncated()(rollouts).all()


def test_top_entropy_by_hand():
    # Ten tokens of different entropies: 0 to 9 tenths of the others lie under them; the upper fifth are two.
    rollouts = rollouts_of([4, 6])
    rollouts.columns["entropy_rank"] = torch.tensor([0.3, 0.9, 0.0, 0.5, 0.7, 0.1, 0.8, 0.6, 0.2, 0.4])
    assert TopEntropy()(rollouts).nonzero().flatten().tolist() == [1, 6]
    assert TopEntropy(fraction=0.5)(rollouts).nonzero().flatten().tolist() == [1, 3, 4, 6, 7]
    assert TopEntropy(fraction=1.0)(rollouts).all()
