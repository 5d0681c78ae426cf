"""config.yaml gives back the options of a run: the line `go on` works, or the run is refused before its first step."""

from pathlib import Path
from typing import NoReturn

import pytest
from helpers.command import Grpo, arguments, parser_of_options, refused
from helpers.paths import ROOT

from grpo_lightning import UsageError
from grpo_lightning.command.parser_internals import subparsers_of
from grpo_lightning.plugins.console.display import saved_config as config_file
from grpo_lightning.plugins.console.display.saved_config import check_readable

CALLBACKS = """
import enum
from collections.abc import Callable, Sequence

import torch
from lightning.pytorch.callbacks import Callback

class Speed(enum.Enum):
    SLOW = 1

class Defaults(Callback):
    def __init__(
        self,
        device: torch.device | str = torch.device("cpu"),
        speed: object = Speed.SLOW,
        rate: Callable = lambda step: 1.0,
        size: int = 3,
    ) -> None:
        assert isinstance(device, torch.device) and speed is Speed.SLOW and rate(1) == 1.0 and size == 4

class Holds(Callback):
    def __init__(self, devices: Sequence = (torch.device("cpu"),)) -> None:
        pass
"""


@pytest.fixture(autouse=True)
def _callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`objects.py`, whose classes have defaults that YAML cannot hold."""
    (tmp_path / "objects.py").write_text(CALLBACKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_run_goes_on_with_its_config_and_any_defaults_of_callbacks(grpo: Grpo) -> None:
    own = ["--trainer.callbacks+=objects.Defaults", "--trainer.callbacks.size=4"]
    timer = ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:01:00:00"]
    grpo.ok("fit", *own, *timer)
    text = Path("run/config.yaml").read_text()
    assert "size: 4" in text and "Unable to serialize" not in text
    grpo.ok("fit", "--config=run/config.yaml", "--ckpt_path=last", "--trainer.max_epochs=2")
    assert Path("run/config.yaml").read_text() == text.replace("max_epochs: 1", "max_epochs: 2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["objects.Holds"], ["cannot hold cpu", "Give text or numbers"]),
        (["ModelPruning", "--trainer.callbacks.pruning_fn=l1_unstructured"], ["pruning_fn: ", "hold l1_unstructured"]),
    ],
    ids=lambda options: options[0],
)
def test_what_config_yaml_cannot_give_back_is_refused(options: list[str], words: list[str], grpo: Grpo) -> None:
    refused(
        grpo, [f"--trainer.callbacks+={options[0]}", *options[1:]], ["config.yaml, with which a run goes on,", *words]
    )


READABLE = """
--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=reward/mean
--trainer.callbacks+=EMAWeightAveraging
--trainer.callbacks+=WeightAveraging
--trainer.callbacks+=LearningRateMonitor
--trainer.callbacks+=ModelCheckpoint
--trainer.callbacks+=Timer --trainer.callbacks.duration={minutes:3}
--trainer.strategy=FSDP2Strategy
--trainer.logger+=CSVLogger
--trainer.plugins=MixedPrecision --trainer.plugins.precision=16-mixed --trainer.plugins.device=cpu
--model.optimizer=transformers.Adafactor
--model.lr_scheduler=OneCycleLR --model.lr_scheduler.max_lr=1e-3 --model.lr_scheduler.total_steps=9
"""


def test_what_comes_from_other_libraries_is_read_back() -> None:
    parser = parser_of_options()
    check_readable(parser, parser.parse_args(arguments("fit", *READABLE.split())))


@pytest.mark.parametrize("options", [[], ["--config=algorithms/dapo.yaml"]], ids=["quickstart", "dapo"])
def test_the_configurations_of_this_package_are_read_back(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "configs")
    monkeypatch.setattr(config_file, "FOREIGN", "class_path")
    parser = parser_of_options()
    check_readable(parser, parser.parse_args(["fit", "--config=quickstart.yaml", *options]))


def test_what_is_read_must_be_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of_options()
    options = parser.parse_args(arguments("fit", "--trainer.callbacks+=LearningRateMonitor"))
    changed = options.fit.clone()
    changed["loop.mu"] = 2

    def refuse(text: str) -> NoReturn:
        raise UsageError("loop.mu=one: expected a number")

    messages = {refuse: "could not be read again: loop.mu=one", lambda text: changed: "other options: loop.mu 1 -> 2"}
    for parse, message in messages.items():
        monkeypatch.setattr(subparsers_of(parser)["fit"], "parse_string", parse)
        with pytest.raises(UsageError, match=message):
            check_readable(parser, options)
