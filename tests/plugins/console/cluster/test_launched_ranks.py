"""One rank that fails ends all within seconds, and one message tells why; and two nodes, as torchrun starts them."""

import json
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.command import Grpo, arguments, furnish
from helpers.fitting import scalars
from helpers.paths import ROOT
from helpers.programs import programs
from helpers.waiting import wait_until
from torch.distributed import TCPStore

FAILS = ["--trainer.callbacks+=helpers.failing.Fails", "--trainer.callbacks.rank=1"]
USAGE = "grpo: error: data.task=x: a mistake; give y"
BUG = "ZeroDivisionError: the true reason"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched-ranks")
    furnish(folder, {"abcd"[:row]: row for row in range(1, 5)}, scale=0.05)
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


def two_ranks(folder: Path, strategy: str, *options: str) -> tuple[int, str]:
    """Exit code and console of a run; none of its processes is left behind."""
    run = folder / f"run-{strategy}-{time.time_ns()}"
    sizes = [f"--trainer.default_root_dir={run}", "--trainer.devices=2", f"--trainer.strategy={strategy}"]
    with programs({"run": arguments("fit", *sizes, *options)}, folder, together=True) as started:
        code = started["run"].wait()
        wait_until(lambda: not [*processes_of(started["run"].pid)])
        return code, started["run"].errors


CASES = [
    ("ddp", "setup", -1, "usage", 2, USAGE),
    ("ddp", "exploring", 1, "usage", 2, USAGE),
    ("ddp", "updating", 0, "kill", -9, ""),
    ("fsdp2", "exploring", 1, "kill", 1, "was ended by SIGKILL (out of memory?)"),
    ("fsdp2", "updating", 0, "bug", 1, BUG),
]


@pytest.mark.parametrize(("strategy", "phase", "rank", "kind", "code", "says"), CASES)
def test_one_failure_ends_both(
    folder: Path, strategy: str, phase: str, rank: int, kind: str, code: int, says: str
) -> None:
    fails = [*FAILS, f"--trainer.callbacks.phase={phase}", f"--trainer.callbacks.rank={rank}"]
    # Under DDP the other rank waits where nothing tells it of the failure, as it may in NCCL.
    fails += [f"--trainer.callbacks.kind={kind}", f"--trainer.callbacks.others_wait={strategy == 'ddp'}"]
    found, console = two_ranks(folder, strategy, *fails)
    assert found == code, console[-3000:]
    assert not says or says in console.strip().splitlines()[-1], console[-3000:]
    assert len(re.findall("grpo: error|^.*Error: ", console, re.MULTILINE)) == bool(says), console[-3000:]


def test_one_bad_question_is_a_fraction_of_both_ranks_samples(folder: Path) -> None:
    """It is half of what its rank scores and a quarter of the step; it is told once."""
    options = ["--model.rewards=[helpers.failing.OneBadQuestion]", "--model.guard.max_failed_rewards=0.3"]
    code, console = two_ranks(folder, "ddp", *options, "--loop.prompts_per_step=4", "--trainer.limit_val_batches=0")
    assert code == 0, console[-3000:]
    says = "reward one_bad_question failed on 2 of 8 samples (error: 2), for example on a sample of rows.jsonl:1"
    assert console.count(says) == console.count("failed on") == 1, console[-3000:]


def test_two_nodes(folder: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts them. They log what one process logs, until node 1 fails; torchrun can read why."""
    options = ["--trainer.max_epochs=2", "--model.objective.beta=0.04", "--loop.group_size=4"]
    options += ["--loop.prompts_per_step=4", "--loop.num_minibatches=2", "--loop.max_tokens=40"]
    page = (ROOT / "docs" / "how_to" / "multi_gpu.md").read_text(encoding="utf-8").replace("\\\n", " ")
    words = shlex.split(next(line for line in page.splitlines() if line.startswith("torchrun --nnodes 2")))
    given = words[words.index("--trainer.num_nodes") :]
    given[given.index("--trainer.devices") + 1] = "1"
    given += ["--trainer.strategy=ddp", "--trainer.default_root_dir=two", *FAILS]
    line = arguments("fit", *options, *given, "--trainer.callbacks.phase=saving", "--trainer.callbacks.step=2")
    port = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # free until rank 0 takes it
    job = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    with ExitStack() as stack:
        nodes = []
        for rank in ("0", "1"):
            own = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": f"{folder}/{rank}"}
            nodes.append(stack.enter_context(programs({"it": line}, folder, together=True, **job, **own))["it"])
        assert [node.wait() for node in nodes] == [1, 1], nodes[1].errors
    assert BUG in json.loads((folder / "1").read_text())["message"]["message"]
    monkeypatch.chdir(folder)
    command.ok("fit", *options, "--trainer.default_root_dir=one")
    one, two = scalars(folder / "one"), scalars(folder / "two")
    assert [*two["optim/grad_norm"]] == [0, 1]  # a step is logged before it is saved
    for name, values in two.items():
        expected = {step: one[name][step] for step in values}
        assert values == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True), name
