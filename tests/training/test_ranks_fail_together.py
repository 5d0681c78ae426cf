"""Whatever ends one of two ranks ends both within seconds; its message is the last one, and stands there once."""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command import arguments
from helpers.programs import programs
from helpers.tiny import policy_of

from grpo_lightning.training.fellow_ranks import FellowRanks, fail_together


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fellow-ranks")
    policy_of(scale=0.05).save_pretrained(folder / "policy")
    rows = (f'{{"question": "{"abcd"[:row]}", "answer": "{row}"}}\n' for row in range(1, 5))
    (folder / "rows.jsonl").write_text("".join(rows))
    return folder


def processes_of(session: int) -> Iterator[int]:
    """The processes of a session that have not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, leader = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(leader) == session and state != "Z":
            yield int(path.parent.name)


def fails(folder: Path, strategy: str, *options: str, anew: bool = False) -> tuple[int, str]:
    """Exit code and what a run of two ranks says on the console."""
    run = folder / f"run-{strategy}-{time.time_ns()}"
    sizes = [f"--trainer.default_root_dir={run}", "--trainer.devices=2", f"--trainer.strategy={strategy}"]
    command = arguments("fit", *sizes, *options)
    with programs({"run": command}, folder, anew=anew, together=True) as started:
        program = started["run"]
        code = program.wait()
        end = time.monotonic() + 10
        while (left := list(processes_of(program.pid))) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, "processes were left behind"
        return code, program.errors


USAGE = "grpo: error: data.task=x: a mistake; give y"
REWARD = "grpo: error: reward r failed on 2 of 2 samples"
MEMORY = "CUDA out of memory. Tried to allocate 9 GiB"
BUG = "ZeroDivisionError: the true reason"
CASES = [
    ("ddp", "setup", 1, "usage", 2, USAGE),
    ("ddp", "exploring", 1, "memory", 1, MEMORY),
    ("ddp", "scoring", -1, "reward", 1, REWARD),
    ("ddp", "updating", 1, "bug", 1, BUG),
    ("ddp", "validating", 1, "interrupt", 130, "grpo: rank 1 was interrupted"),
    ("ddp", "saving", 0, "bug", 1, BUG),
    ("fsdp2", "setup", 0, "usage", 2, USAGE),
    ("fsdp2", "exploring", 1, "kill", 1, "ended by SIGKILL; the system does that when memory runs out"),
    ("fsdp2", "scoring", 1, "reward", 1, REWARD),
    ("fsdp2", "updating", 0, "memory", 1, MEMORY),
    ("fsdp2", "validating", 1, "bug", 1, BUG),
    ("fsdp2", "saving", 1, "bug", 1, BUG),
]


@pytest.mark.parametrize(("strategy", "phase", "rank", "kind", "code", "says"), CASES)
def test_one_failure_ends_both(
    folder: Path, strategy: str, phase: str, rank: int, kind: str, code: int, says: str
) -> None:
    fail = f"--trainer.callbacks+=helpers.failing.Fails --trainer.callbacks.phase={phase}".split()
    fail += [f"--trainer.callbacks.rank={rank}", f"--trainer.callbacks.kind={kind}"]
    # New interpreters, which share less than forks do, where a rank speaks and where one is gone without a word.
    found, console = fails(
        folder, strategy, *fail, anew=(strategy, phase) in [("ddp", "updating"), ("fsdp2", "exploring")]
    )
    lines = console.strip().splitlines()
    # Behind an error of memory there may be the table of what was held.
    assert says in lines[-1] or says is MEMORY, console[-3000:]
    assert console.count(says) == 1, console[-3000:]
    assert found == code, console[-3000:]


def test_one_bad_question_is_a_fraction_of_both_ranks_samples(folder: Path) -> None:
    """It is half of what its rank scores and a quarter of the step; it is told once."""
    options = ["--model.rewards=[helpers.failing.OneBadQuestion]", "--model.max_failed_rewards=0.3"]
    options += ["--loop.prompts_per_step=4", "--trainer.limit_val_batches=0"]
    code, console = fails(folder, "ddp", *options)
    assert code == 0, console[-3000:]
    says = "reward one_bad_question failed on 2 of 8 samples (error: 2), for example on a sample of rows.jsonl:1"
    assert console.count(says) == console.count("failed on") == 1, console[-3000:]
    code, console = fails(folder, "ddp", *options, "--model.max_failed_rewards=0.2")
    assert code == 1
    assert "grpo: error: reward one_bad_question failed on 2 of 8 samples" in console.strip().splitlines()[-1]
    assert console.count("grpo: error") == 1, console[-3000:]


def test_a_run_without_other_ranks_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with fail_together():
        assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit), fail_together():
        raise SystemExit(75)
    assert not list(tmp_path.iterdir())


def test_the_first_that_writes_makes_the_folder_and_none_does_once_the_first_process_is_gone(tmp_path: Path) -> None:
    fellows = FellowRanks(tmp_path / "shared")
    claimed = fellows.claim("why", 3)
    assert fellows.first() == claimed and (tmp_path / "shared").stat().st_mode & 0o777 == 0o700
    fellows.close()
    assert not (tmp_path / "shared").exists()
    fellows.parent = os.getpid()
    assert fellows.claim("too late", 3).text == "too late"
    assert not (tmp_path / "shared").exists()


def test_a_failed_start_does_not_end_the_next_one_of_the_same_job(tmp_path: Path) -> None:
    words = tmp_path / "last_words.json"
    words.write_text(json.dumps({"process": 1, "text": "earlier", "code": 2, "final": True}))
    os.utime(words, (0, 0))
    fellows = FellowRanks(tmp_path, external=True)
    assert fellows.first() is None
    fellows.close()
