from pathlib import Path

import pytest
from helpers.fast import policy_of
from helpers.loading import load_tool
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.plugins.rewards.learned.learned_reward import SEED, LearnedReward
from grpo_lightning.plugins.rewards.learned.replay import read_labelled

tool = load_tool("make_reward_model")


def test_it_makes_a_classifier_with_its_seed_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    disable_progress_bar()
    policy_of(scale=0.05).save_pretrained(tmp_path / "policy")
    tool.make(tmp_path / "out", tmp_path / "policy", questions=32, num_passes=1, max_new_tokens=6)
    assert "256 answers, 0.000 of them right" in capsys.readouterr().out
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 1
    seed_set = read_labelled(tmp_path / "out" / SEED)
    assert len(seed_set) == 32 and all(len(group) == 4 for group in seed_set)
    reward = LearnedReward(str(tmp_path / "out"))
    assert {group.prompt for group in [*reward.iterations.history, *reward.iterations.test]} == {
        group.prompt for group in seed_set
    }
