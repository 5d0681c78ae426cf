"""Every configuration in configs/ fits the signatures: types, ranges and no unknown key."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.paths import ROOT

from grpo_lightning.cli import GRPOCLI

CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
RUNNABLE = ["model", "data"]
"""The sections a configuration that runs on its own has; one that changes a method builds on another."""


class Built(GRPOCLI):
    """The command line up to its objects: no model is read, no data, nothing runs."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """None: the trainer may want hardware that is not here."""

    def after_instantiate_classes(self) -> None:
        """Nothing: it would read the data and the model's folder."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing."""


def build(config: Path, subcommand: str = "fit") -> Built:
    runnable = all(section in yaml.safe_load(config.read_text()) for section in RUNNABLE)
    base = [] if runnable else ["--config", str(QUICKSTART)]
    return Built([subcommand, *base, "--config", str(config)])


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo"])


def test_the_first_line_of_a_layer_says_so() -> None:
    for path in CONFIGS.rglob("*.yaml"):
        has_task = "task" in yaml.safe_load(path.read_text()).get("data", {})
        assert path.read_text().startswith("# A layer over ") != has_task, path


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("benchmarks/*.yaml")]), ids=lambda path: path.name
)  # others: test_algorithms
def test_config_fits_the_signatures(path: Path) -> None:
    cli = build(path)
    assert cli.model.explorer.scorer.rewards and cli.datamodule.task is not None


@pytest.mark.parametrize("subcommand", ["validate", "predict"])
def test_one_file_serves_every_subcommand(subcommand: str) -> None:
    build(QUICKSTART, subcommand)
