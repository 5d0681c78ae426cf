"""OneStepOffPolicy in processes of its own: two ranks, and kills at random moments."""

from pathlib import Path

import pytest
from helpers.killing import check_alike, command, die_and_go_on, prepare
from helpers.paths import ROOT
from helpers.programs import programs

ELSEWHERE = ("--model.engine=helpers.elsewhere.Elsewhere", "--model.engine.seconds=0.1", "--model.policy.dropout=false")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    prepare(tmp_path)
    return tmp_path


def test_two_ranks_have_a_lag_of_one_step(folder: Path) -> None:
    ranks = ("--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=20")
    for name, source in (("unbroken", "StaleSource"), ("killed", "OneStepOffPolicy")):
        more = (*ELSEWHERE, *ranks, f"--loop.source={source}", "--checkpoint.every_n_steps=100")
        with programs({name: command(folder / name, *more)}, folder) as started:
            assert started[name].wait() == 0, started[name].errors[-3000:]
    check_alike(folder)


def test_sigkills_at_random_moments_change_nothing(folder: Path) -> None:
    die_and_go_on(folder, 6, *ELSEWHERE, "--loop.source=OneStepOffPolicy")
    check_alike(folder)
