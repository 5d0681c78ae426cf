"""What TensorBoard shows first: its first group, the page under Custom Scalars, and the options that differ."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Grpo
from helpers.fast import fit
from helpers.fitting import charts_of, events_of, scalars
from tensorboard.plugins.hparams import plugin_data_pb2

from grpo_lightning.maths.objective import Objective
from grpo_lightning.plugins.console.display.first_look import Board, FirstLook, copies
from grpo_lightning.plugins.looking.run_files.run_scalars import read_scalars


def test_reward_and_validation_come_first_and_charts_hold_logged_metrics(tmp_path: Path) -> None:
    trainer = {"logger": Board(tmp_path, name="", version=""), "limit_val_batches": 1.0, "max_epochs": 1}
    fit(tmp_path, [FirstLook()], objective=Objective(beta=0.1), trainer=trainer)
    events = events_of(tmp_path)
    names = sorted(events.Tags()["scalars"])
    first = ["1 reward", "2 val avg@2", "3 val greedy", "4 length", "5 entropy"]
    assert names[:5] == [f"First look/{name}" for name in first]
    for copy, name in (("1 reward", "reward/mean"), ("2 val avg@2", "val/avg@2"), ("5 entropy", "policy/entropy")):
        pairs = [[(event.step, event.value) for event in events.Scalars(tag)] for tag in (f"First look/{copy}", name)]
        assert pairs[0] == pairs[1]
    assert {*names} - {*read_scalars(tmp_path)} == {*names[:5]}
    # A constant is no curve.
    assert {"optim/updates", "optim/bad_updates", "rollout/wasted"} & {*names} == set()
    charts = [[*chart.multiline.tag] for chart in charts_of(tmp_path)]
    assert len(charts) == 12 and all(len(tags) <= 2 for tags in charts)
    for tag in [tag for tags in charts for tag in tags]:
        # TensorBoard looks from the beginning of a name.
        assert sum(bool(re.match(tag, name)) for name in names) == 1 or "length_" in tag, tag
    assert "kl_ref" in str(charts)
    fit(tmp_path / "bare", [FirstLook()], trainer={"max_epochs": 1})
    bare = str(charts_of(tmp_path / "bare"))
    assert "kl_ref" not in bare and "val/" not in bare


def test_a_validation_stands_in_the_tab_text_with_its_intervals(tmp_path: Path) -> None:
    fit(tmp_path, [FirstLook()], trainer={"limit_val_batches": 1.0, "max_epochs": 1})
    events = events_of(tmp_path).Tensors("validation/text_summary")
    assert [event.step for event in events] == [-1, 0]
    seen = scalars(tmp_path)
    text = events[1].tensor_proto.string_val[0].decode()
    assert re.search(rf"\| avg@2 \| {seen['val/avg@2'][0]:.2f} ± {seen['val/ci95'][0]:.2f} \| 24 \|", text), text
    assert re.search(rf"\| length \| {seen['val/length'][0]:.2f} ± \d+\.\d\d \| 24 \|", text), text


def test_only_whole_names_are_copied() -> None:
    assert copies({"val/pass@16": 1, "reward/mean_of_mine": 2, "val/avg@16": 3}) == {"First look/2 val avg@16": 3}


def started(folder: Path) -> dict[str, Any]:
    """The options that a run shows in the tab HPARAMS."""
    metadata = events_of(folder).summary_metadata["_hparams_/session_start_info"]
    data = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in data.session_start_info.hparams.items()}


def test_a_sweep_shows_what_is_swept(grpo: Grpo, tmp_path: Path) -> None:
    options = "--model.optimizer=torch.optim.AdamW"
    for rate in ("0.001", "0.01"):
        grpo.ok("fit", options, f"--model.optimizer.lr={rate}", f"--trainer.default_root_dir={rate}")
    first, second = started(tmp_path / "0.001"), started(tmp_path / "0.01")
    assert {name for name in first if first[name] != second.get(name)} == {
        "model.optimizer.lr",
        "trainer.default_root_dir",
    }
    assert (first["model.optimizer.lr"], second["model.optimizer.lr"]) == (0.001, 0.01)
    assert first["model.optimizer"] == "AdamW" and first["model.objective.surrogate"] == "Clipped"
    assert first["loop.group_size"] == 2 and first["model.rewards.0"] == "FormatReward"
    # This would fix the columns to those of one run.
    assert "_hparams_/experiment" not in events_of(tmp_path / "0.01").summary_metadata


def test_a_changed_option_is_taken_said_and_both_configurations_are_kept(
    grpo: Grpo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    grpo.ok("fit", "--model.optimizer.lr=0.001")
    first, again = (run / "config.yaml").read_text(), "--ckpt_path=last"
    changes = ["--trainer.max_epochs=2", "--model.optimizer.lr=0.002", "--model.objective.beta=0.1"]
    grpo.ok("fit", again, *changes)
    assert list(scalars(run)["optim/lr"].values()) == pytest.approx([0.001, 0.002])
    (message,) = [message for message in caplog.messages if "with these changes" in message]
    assert sorted(message.splitlines()[1:]) == [
        "  model.objective.beta 0.0 -> 0.1",
        "  model.optimizer.lr 0.001 -> 0.002",
        "  trainer.max_epochs 1 -> 2",
    ]
    assert (run / "config.1.yaml").read_text() == f"# until step 1\n{first}"
    shown = started(run)
    assert shown["model.optimizer.lr"] == "0.001 → 0.002 at step 2"
    assert shown["trainer.max_epochs"] == 2  # the newest
    assert "lr: 0.002" in (run / "config.yaml").read_text()

    # The newest alone goes on as it is, and nothing is moved for it.
    grpo.ok("fit", "--config=run/config.yaml", again, "--trainer.max_epochs=3", "--model.rewards!")
    assert list(scalars(run)["optim/lr"].values()) == pytest.approx([0.001, 0.002, 0.002])
    assert len(list(run.glob("config*.yaml"))) == 3
