"""What TensorBoard shows first: its first group, the page under Custom Scalars, and the options that differ."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command import Grpo
from helpers.fitting import fit
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from grpo_lightning.maths.objective import Objective
from grpo_lightning.plugins.inspect.scalars import read_scalars
from grpo_lightning.training.board import Board, copies
from grpo_lightning.training.callbacks.config import hyperparameters
from grpo_lightning.training.callbacks.layout import FirstLook


def events_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_reward_and_validation_come_first_in_the_alphabet(tmp_path: Path) -> None:
    board = Board(tmp_path, name="", version="")
    fit(tmp_path, trainer={"logger": board, "limit_val_batches": 1.0, "max_epochs": 1})
    events = events_of(tmp_path)
    names = sorted(events.Tags()["scalars"])
    first = ["1 reward", "2 val avg@2", "3 val greedy", "4 length", "5 entropy"]
    assert names[:5] == [f"First look/{name}" for name in first]
    for copy, name in (("1 reward", "reward/mean"), ("2 val avg@2", "val/avg@2"), ("5 entropy", "policy/entropy")):
        assert [(event.step, event.value) for event in events.Scalars(f"First look/{copy}")] == [
            (event.step, event.value) for event in events.Scalars(name)
        ]
    assert {*names} - {*read_scalars(tmp_path)} == {*names[:5]}
    # A constant is no curve.
    assert {"optim/updates", "optim/bad_updates", "rollout/wasted"} & {*names} == set()


def test_only_whole_names_are_copied() -> None:
    assert copies({"val/pass@16": 1, "reward/mean_of_mine": 2, "val/avg@16": 3}) == {"First look/2 val avg@16": 3}


def test_the_page_has_charts_of_what_the_run_logs(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, name="", version="")]
    trainer = {"logger": loggers, "limit_val_batches": 1.0, "max_epochs": 2}
    fit(tmp_path, [FirstLook()], objective=Objective(beta=0.1), trainer=trainer)
    events = events_of(tmp_path)
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    (category,) = layout.category
    assert category.title == "First look" and len(category.chart) == 12
    assert all(len(chart.multiline.tag) <= 2 for chart in category.chart)
    logged = events.Tags()["scalars"]
    for chart in category.chart:
        for tag in chart.multiline.tag:
            # TensorBoard looks from the beginning of a name.
            matches = [name for name in logged if re.match(tag, name)]
            assert len(matches) == 1 or "length_" in tag, (tag, matches)
    tags = [tag for chart in category.chart for tag in chart.multiline.tag]
    assert any("kl_ref" in tag for tag in tags)


def test_a_run_without_reference_and_validation_has_no_charts_of_them(tmp_path: Path) -> None:
    fit(tmp_path, [FirstLook()], trainer={"max_epochs": 1})
    (event,) = events_of(tmp_path).Tensors("custom_scalars__config__")
    text = str(layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]))
    assert "kl_ref" not in text and "val/" not in text


def started(folder: Path) -> dict[str, Any]:
    """The options that a run shows in the tab HPARAMS."""
    metadata = events_of(folder).summary_metadata["_hparams_/session_start_info"]
    data = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in data.session_start_info.hparams.items()}


def test_a_sweep_shows_what_is_swept(grpo: Grpo, tmp_path: Path) -> None:
    options = "--model.optimizer=torch.optim.AdamW"
    for rate in ("0.001", "0.01"):
        code, _, errors = grpo("fit", options, f"--model.optimizer.lr={rate}", f"--trainer.default_root_dir={rate}")
        assert code == 0, errors
    first, second = started(tmp_path / "0.001"), started(tmp_path / "0.01")
    assert {name for name in first if first[name] != second.get(name)} == {"lr"}
    assert (first["lr"], second["lr"]) == (0.001, 0.01)
    assert first["optimizer"] == "AdamW" and first["surrogate"] == "Clipped" and first["surrogate.clip_low"] == 0.2
    assert first["group_size"] == 2 and first["rewards"] == "FormatReward" and first["policy"] == "policy"
    assert len(first) < 50 and not any(name.startswith(("data", "amsgrad")) for name in first)
    # This would fix the columns to those of one run.
    assert "_hparams_/experiment" not in events_of(tmp_path / "0.01").summary_metadata


FUNCTION = "{class_path: grpo_lightning.FunctionReward, init_args: {function: 'my_rewards:brief'}}"


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        ("[MathVerifier]", "MathVerifier"),
        ("[{class_path: a.b.Mine, init_args: {weight: 2}}]", "Mine"),
        (f"[{FUNCTION}], validation: {{judge: {FUNCTION}}}", "my_rewards.brief"),
    ],
)
def test_hyperparameters_of_a_short_configuration(reward: str, shown: str) -> None:
    text = f"{{model: {{rewards: {reward}, objective: {{beta: 0.1, masks: []}}}}, loop: {{mu: 2, stop: null}}}}"
    assert hyperparameters(yaml.safe_load(text)) == {
        "beta": 0.1,
        "mu": 2,
        "rewards": shown,
        **({"judge": shown} if "judge" in reward else {}),
    }
