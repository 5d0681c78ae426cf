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
    - class_path: MathVerifier
    - {class_path: FormatReward, init_args: {weight: 0.3}}
"""


def model(grpo: Grpo, *arguments: str) -> dict[str, Any]:
    """`model` of the whole configuration, with short class names."""
    code, out, error = grpo("fit", *arguments, "--print_config")
    assert code == 0, error
    found: dict[str, Any] = yaml.safe_load(out.replace("grpo_lightning.", ""))["model"]
    return found


@pytest.fixture
def before(tmp_path: Path) -> str:
    path = tmp_path / "before.yaml"
    path.write_text(BEFORE)
    return f"--config={path}"


@pytest.mark.parametrize("way", ["flag", "file"])
def test_another_class_has_its_own_defaults(grpo: Grpo, tmp_path: Path, before: str, way: str) -> None:
    (tmp_path / "after.yaml").write_text("model: {objective: {surrogate: CISPO}, optimizer: torch.optim.SGD}")
    flags = ["--model.objective.surrogate=CISPO", "--model.optimizer=torch.optim.SGD"]
    found = model(grpo, before, *(flags if way == "flag" else [f"--config={tmp_path / 'after.yaml'}"]))
    assert found["objective"]["surrogate"] == {"class_path": "CISPO", "init_args": {"clip_low": None, "clip_high": 4.0}}
    assert found["optimizer"]["init_args"]["lr"] == 0.001


def test_the_same_class_keeps_what_is_not_changed(grpo: Grpo, before: str) -> None:
    surrogate = model(grpo, before, "--model.objective.surrogate.clip_low=0.3")["objective"]["surrogate"]
    assert surrogate["init_args"] | {"dual_clip": None} == {"clip_low": 0.3, "clip_high": 0.28, "dual_clip": None}
    again = model(grpo, before, "--model.objective.surrogate=Clipped")["objective"]["surrogate"]
    assert again["init_args"]["clip_high"] == 0.28


@pytest.mark.parametrize("way", ["flag", "file"])
def test_a_list_is_replaced_as_a_whole(grpo: Grpo, tmp_path: Path, before: str, way: str) -> None:
    (tmp_path / "after.yaml").write_text("model: {rewards: [MathVerifier, FormatReward]}")
    flag = "--model.rewards=[MathVerifier, FormatReward]"
    rewards = model(grpo, before, flag if way == "flag" else f"--config={tmp_path / 'after.yaml'}")["rewards"]
    assert [reward["class_path"] for reward in rewards] == ["MathVerifier", "FormatReward"]
    assert rewards[1]["init_args"]["weight"] == 1.0


def test_a_list_may_grow(grpo: Grpo, before: str) -> None:
    rewards = model(grpo, before, "--model.rewards+=OverlongPenalty")["rewards"]
    assert [reward["class_path"] for reward in rewards] == ["MathVerifier", "FormatReward", "OverlongPenalty"]
    assert [reward["init_args"]["weight"] for reward in rewards] == [1.0, 0.3, 1.0]
