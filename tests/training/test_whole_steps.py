"""Runs stop, save and go on where a step has ended; and the last step is validated."""

import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers.command import Grpo
from helpers.fitting import fit, of_updates, points
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from grpo_lightning import StepCheckpoint, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

VALIDATES: dict[str, Any] = {"limit_val_batches": 1, "enable_checkpointing": True}


def go(folder: Path, callbacks: list[L.Callback], ckpt_path: Any = None, mu: int = 4, **trainer: Any) -> None:
    fit(folder, callbacks, loop={"mu": mu}, trainer=VALIDATES | trainer, ckpt_path=ckpt_path)


def loaded(path: str | Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def same(a: str | Path, b: str | Path) -> bool:
    one, two = (loaded(path)["state_dict"] for path in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class Stops(L.Callback):
    """Whoever asks a run to stop, in the middle of the second step."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop |= trainer.current_epoch == 1 and batch_idx == 1


@pytest.mark.parametrize("kind", ["early stopping", "callback"])
def test_a_run_that_is_asked_to_stop_ends_its_step(kind: str, tmp_path: Path) -> None:
    stops = {
        "early stopping": EarlyStopping("val/reward", mode="max", patience=2, min_delta=99.0),
        "callback": Stops(),
    }[kind]
    go(tmp_path / "cut", [StepCheckpoint(), stops], val_check_interval=0.5)
    assert [len(rates) for rates in of_updates(tmp_path / "cut", "optim/lr")] == [4, 4]
    assert loaded(tmp_path / "cut/checkpoints/last.ckpt")["global_step"] == 8
    go(tmp_path / "cut", [StepCheckpoint()], "last", val_check_interval=0.5)
    go(tmp_path / "whole", [StepCheckpoint()], val_check_interval=0.5)
    assert same(tmp_path / "cut/checkpoints/last.ckpt", tmp_path / "whole/checkpoints/last.ckpt")
    assert points(tmp_path / "cut") == points(tmp_path / "whole")


@pytest.mark.parametrize(
    "trainer", [{"val_check_interval": 0.5}, {"val_check_interval": 4, "check_val_every_n_epoch": None}], ids=str
)
def test_the_last_step_is_validated_once_and_a_run_goes_on_from_it(trainer: dict[str, Any], tmp_path: Path) -> None:
    options = {"check_val_every_n_epoch": 2} | trainer
    for name, starts in (("whole", [4]), ("cut", [3, 4])):
        for steps in starts:
            last = "last" if steps > starts[0] else None
            go(tmp_path / name, [StepCheckpoint()], last, mu=2, max_epochs=steps, **options)
    whole, cut = points(tmp_path / "whole"), points(tmp_path / "cut")
    # Half a step lets each step that is validated have two: after both of its updates.
    validations = 2 if options.get("val_check_interval") == 0.5 else 1
    assert [step for step, _ in whole["val/reward"]] == [-1, *[1] * validations, *[3] * validations]
    # The one point more, where the shorter run ended.
    for name in [name for name in cut if name.startswith("val/")]:
        assert [step for step, _ in cut[name] if step not in dict(whole[name])] == [2]
        cut[name] = [point for point in cut[name] if point[0] != 2]
    cut["epoch"].remove((2, 2.0))  # it is logged with them
    assert cut == whole
    assert same(tmp_path / "cut/checkpoints/last.ckpt", tmp_path / "whole/checkpoints/last.ckpt")


@pytest.mark.parametrize("options", [{}, {"save_top_k": 2, "monitor": "val/reward"}])
def test_checkpoints_of_lightnings_own_are_of_whole_steps(options: dict[str, Any], tmp_path: Path) -> None:
    saver = ModelCheckpoint(mode="max", filename="{epoch}", **options)
    trainer: dict[str, Any] = {"check_val_every_n_epoch": 2, "max_epochs": 5}
    fit(tmp_path / "whole", [saver], loop={"mu": 2}, trainer=VALIDATES | trainer)
    found = sorted(Path(saver.dirpath or "").glob("*.ckpt"))
    # Steps that were validated, the last one among them.
    assert {loaded(path)["epoch"] for path in found} <= {1, 3, 4}
    go(tmp_path / "on", [], found[0], mu=2, **trainer | {"max_epochs": 6})
    go(tmp_path / "whole", [], found[-1], mu=2, **trainer | {"max_epochs": 6})
    ends = [next((tmp_path / name).rglob("epoch=5*.ckpt")) for name in ("on", "whole")]
    assert same(*ends)


def test_checkpoints_in_the_middle_of_a_step_are_refused(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
            if not trainer.sanity_checking:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    go(tmp_path / "a", [Saves()])
    with pytest.raises(UsageError, match=r"half.ckpt: it was saved in the middle of step 3"):
        go(tmp_path / "b", [], tmp_path / "half.ckpt", max_epochs=4)
    for options in ({"every_n_train_steps": 1}, {"train_time_interval": timedelta(1)}):
        with pytest.raises(UsageError, match="every_n_epochs"):
            go(tmp_path / "c", [ModelCheckpoint(**options)])  # type: ignore[arg-type]


def test_a_folder_that_the_nodes_do_not_share_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lightning.ranks.gather", lambda value: [value, value])
    trainer: Any = SimpleNamespace(ckpt_path="last.ckpt")
    StepCheckpoint().on_fit_start(trainer, None)  # type: ignore[arg-type]
    monkeypatch.setattr("grpo_lightning.ranks.gather", lambda value: [False, value])
    with pytest.raises(UsageError, match=r"rank 1 finds last.ckpt and rank 0 does not.*a disk that all nodes share"):
        StepCheckpoint().on_fit_start(trainer, None)  # type: ignore[arg-type]


def test_a_run_with_lightnings_checkpoint_callback_suspends_and_continues(grpo: Grpo) -> None:
    best = "{class_path: ModelCheckpoint, init_args: {monitor: val/reward, mode: max, filename: best}}"
    steps = ["--trainer.max_epochs=3", f"--trainer.callbacks=[{best}]"]
    before = signal.getsignal(signal.SIGUSR1)
    signals = ["--trainer.callbacks+=helpers.failing.Signals", "--trainer.callbacks.name=SIGUSR1"]
    code, _, errors = grpo("fit", *steps, *signals, "--trainer.callbacks.step=2")
    assert code == 75, errors
    assert signal.getsignal(signal.SIGUSR1) == before
    grpo.ok("fit", *steps, "--ckpt_path=run/checkpoints/best.ckpt")
