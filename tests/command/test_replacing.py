"""A class that takes another's place begins with its own defaults, and a list with nothing of the old one."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command import Grpo

BEFORE = """
model:
  objective: {surrogate: {class_path: Clipped, init_args: {clip_low: 0.1, clip_high: 0.28}}}
  optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.5, weight_decay: 0.25}}
  rewards:
    - class_path: OverlongPenalty
    - {class_path: FormatReward, init_args: {weight: 0.3}}
"""


AFTER = "model: {objective: {surrogate: CISPO}, optimizer: torch.optim.SGD, rewards: [OverlongPenalty, FormatReward]}"
FLAGS = ["--model.objective.surrogate=CISPO", "--model.optimizer=torch.optim.SGD"]
FLAGS += ["--model.rewards=[OverlongPenalty, FormatReward]"]


OWN = """
from grpo_lightning import Reward, RewardResult

def const(sample):
    return 1.0

class Around(Reward):
    def __init__(self, inner: Reward) -> None:
        super().__init__()

    def score(self, samples):
        return RewardResult([0.0] * len(samples))

number = 3
"""


@pytest.fixture
def model(grpo: Grpo, tmp_path: Path) -> Any:
    """Returns `model` of the whole configuration after BEFORE and some options, with short class names."""
    (tmp_path / "before.yaml").write_text(BEFORE)
    (tmp_path / "after.yaml").write_text(AFTER)

    def found(*options: str) -> dict[str, Any]:
        out = grpo.ok("fit", "--config=before.yaml", *options, "--print_config")
        return yaml.safe_load(out.replace("grpo_lightning.", ""))["model"]

    return found


@pytest.mark.parametrize("options", [FLAGS, ["--config=after.yaml"]], ids=["flags", "file"])
def test_another_class_has_its_own_defaults_and_lists_are_replaced(options: list[str], model: Any) -> None:
    found = model(*options)
    assert found["objective"]["surrogate"] == {"class_path": "CISPO", "init_args": {"clip_low": None, "clip_high": 4.0}}
    assert found["optimizer"]["init_args"]["lr"] == 0.001
    assert [reward["class_path"] for reward in found["rewards"]] == ["OverlongPenalty", "FormatReward"]
    assert found["rewards"][1]["init_args"]["weight"] == 1.0


def test_the_same_class_keeps_what_is_not_changed_and_a_list_may_grow(model: Any) -> None:
    found = model("--model.objective.surrogate.clip_low=0.3", "--model.rewards+=OverlongPenalty")
    surrogate, rewards = found["objective"]["surrogate"], found["rewards"]
    assert surrogate["init_args"] | {"dual_clip": None} == {"clip_low": 0.3, "clip_high": 0.28, "dual_clip": None}
    again = model("--model.objective.surrogate=Clipped")["objective"]["surrogate"]
    assert again["init_args"]["clip_high"] == 0.28
    assert [reward["class_path"] for reward in rewards] == ["OverlongPenalty", "FormatReward", "OverlongPenalty"]
    assert [reward["init_args"]["weight"] for reward in rewards] == [1.0, 0.3, 1.0]


def test_the_import_path_of_a_function_is_the_reward_that_calls_it(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(
        "model: {rewards: [own_rewards.const, {class_path: own_rewards.const, init_args: {name: second, weight: 0.5}}],"
        " validation: {grader: own_rewards.const}}"
    )
    found = model("--config=own.yaml", "--model.rewards+=own_rewards.py:const", "--model.rewards.name=third")
    rewards = found["rewards"]
    assert {reward["class_path"] for reward in (*rewards, found["validation"]["grader"])} == {"FunctionReward"}
    arguments = [reward["init_args"] for reward in rewards]
    assert [one["function"] for one in arguments] == ["own_rewards.const"] * 2 + ["own_rewards.py:const"]
    assert [(one["name"], one["weight"]) for one in arguments] == [(None, 1.0), ("second", 0.5), ("third", 1.0)]
    assert found["validation"]["grader"]["init_args"]["function"] == "own_rewards.const"
    (alone,) = model("--model.rewards=own_rewards.const")["rewards"]
    assert alone["init_args"]["function"] == "own_rewards.const"
    nested = "[{class_path: own_rewards.Around, init_args: {inner: own_rewards.const}}]"
    (one,) = model(f"--model.rewards={nested}")["rewards"]
    assert one["init_args"]["inner"]["init_args"]["function"] == "own_rewards.const"
