"""Two nodes, here two agents of torchrun over loopback: the numbers of one process, one end, and a job that goes on."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.command import Grpo, arguments
from helpers.fitting import scalars
from helpers.paths import ROOT, environment
from helpers.tiny import policy_of
from helpers.waiting import LIMIT
from torch.distributed import TCPStore

from grpo_lightning.training import fellow_nodes
from grpo_lightning.training.callbacks.checkpoint import refuse_other_starts
from grpo_lightning.training.fellow_nodes import FellowNodes, Meeting
from grpo_lightning.training.fellow_ranks import FellowRanks
from grpo_lightning.types import UsageError

OPTIONS = [
    "--trainer.max_epochs=3",
    '--model.rewards=[{"class_path": "FormatReward", "init_args": {"pattern": ".*[a-m]+.*"}}]',
    "--model.objective.beta=0.04",
    "--model.optimizer.lr=0.001",
    "--loop.group_size=4",
    "--loop.prompts_per_step=4",
    "--loop.num_minibatches=2",
    "--loop.max_tokens=40",
    "--ckpt_path=last",
]


def line_of(node: int, port: int) -> list[str]:
    """The line of docs/multi_gpu.md, for nodes of one process each on this machine, with the options of these tests."""
    page = (ROOT / "docs" / "multi_gpu.md").read_text(encoding="utf-8").replace("\\\n", " ")
    words = shlex.split(next(line for line in page.splitlines() if line.startswith("torchrun --nnodes")))
    here = {"--node-rank": str(node), "--nproc-per-node": "1", "--master-addr": "127.0.0.1", "--master-port": str(port)}
    here |= {"--trainer.devices": "1"}
    pairs = zip(["", *words[:-1]], words, strict=True)
    told = [here.get(before, word) for before, word in pairs]
    config, fit = told.index("--config"), told.index("fit")
    del told[config : config + 2]
    return [sys.executable, "-m", "torch.distributed.run", *told[1:fit], *arguments("fit", *OPTIONS), *told[fit + 1 :]]


def start(folder: Path, name: str, node: int, port: int, *options: str) -> subprocess.Popen[str]:
    """One of two nodes."""
    return subprocess.Popen(
        [*line_of(node, port), f"--trainer.default_root_dir={name}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
    )


def nodes(folder: Path, runs: dict[str, Sequence[str]]) -> dict[str, list[tuple[int, str]]]:
    """Both nodes of each run, all at the same time: exit codes and what the consoles show."""
    started = {}
    try:
        for name, options in runs.items():
            port = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # free until torchrun takes it
            started[name] = [start(folder, name, node, port, *options) for node in (0, 1)]
        found: dict[str, list[tuple[int, str]]] = {}
        for name, both in started.items():
            consoles = [process.communicate(timeout=LIMIT)[0] for process in both]
            found[name] = [(process.returncode, text) for process, text in zip(both, consoles, strict=True)]
        return found
    finally:
        for process in (process for both in started.values() for process in both):
            with process:
                process.kill()


def assert_same(run: Path, expected: Path) -> None:
    found, scalars_of_one = scalars(run), scalars(expected)
    assert found.keys() == scalars_of_one.keys()
    for name, values in scalars_of_one.items():
        assert found[name] == pytest.approx(values, rel=1e-6, abs=1e-6, nan_ok=True), name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    policy_of(scale=0.05).save_pretrained(tmp_path / "policy")
    rows = (f'{{"question": "{"1" * row}", "answer": "{row}"}}\n' for row in range(1, 10))
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_nodes(folder: Path, command: Grpo) -> None:
    """One run is well; in the other a node is killed, the other node ends and tells why, and the job goes on."""
    killed = ["--trainer.callbacks+=helpers.failing.Signals", "--trainer.callbacks.name=SIGKILL"]
    killed += ["--trainer.callbacks.step=2", "--trainer.callbacks.rank=1", "--trainer.strategy=ddp"]
    found = nodes(folder, {"fsdp2": ["--trainer.strategy=fsdp2"], "ddp": killed})
    code, _, errors = command("fit", *OPTIONS, "--trainer.default_root_dir=one")
    assert code == 0, errors
    assert [code for code, _ in found["fsdp2"]] == [0, 0], found["fsdp2"]
    assert_same(folder / "fsdp2", folder / "one")

    (first, console), (second, _) = found["ddp"]
    assert first and second
    reason = re.findall(r"^grpo: error: .*", console, re.MULTILINE)
    assert len(reason) == 1 and f'Traceback (most recent call last):\n  File "{ROOT}' not in console, console
    silent = re.match(r"grpo: error: node 1 \(.+\), rank 1: no sign of life for (\d+) s\. It was killed", reason[0])
    assert silent is not None and int(silent[1]) < 30, console
    (first, console), (second, _) = nodes(folder, {"ddp": ["--trainer.strategy=ddp"]})["ddp"]
    assert first == second == 0, console
    assert_same(folder / "ddp", folder / "one")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that live faster."""
    monkeypatch.setattr(fellow_nodes, "BEAT", 0.02)
    monkeypatch.setattr(fellow_nodes, "HURRY", 0.4)
    monkeypatch.setattr(fellow_nodes, "LOST", 2.0)


class Node:
    """A rank of the job in this process: what it was told."""

    def __init__(self, rank: int, port: int, world_size: int = 2) -> None:
        self.ended = threading.Event()
        self.found = ("", -1)
        self.fellows = FellowNodes(Meeting("127.0.0.1", port, rank, world_size, rank, serves=False), self._end)

    def _end(self, text: str, code: int) -> None:
        self.found = text, code
        self.ended.set()

    def wait(self) -> tuple[str, int]:
        assert self.ended.wait(LIMIT)
        return self.found


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.usefixtures("quick")
def test_a_node_that_fails_tells_the_others(store: TCPStore) -> None:
    one, other = Node(0, store.port), Node(1, store.port)
    other.fellows.tell("Traceback ...\nZeroDivisionError: the true reason", 1)
    text, code = one.wait()
    assert re.fullmatch(r"grpo: error: node 1 \(.+\) failed: ZeroDivisionError: the true reason", text)
    assert code == 1
    one.fellows.tell("grpo: error: a consequence", 2)  # too late
    assert json.loads(store.get("grpo/0/words"))["node"] == 1
    for node in (one, other):
        node.fellows.close()
    assert not other.ended.is_set()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("silent", "watching"), [(1, 0), (0, 1), (2, 1)])
def test_a_node_that_is_silent_is_missed(store: TCPStore, silent: int, watching: int) -> None:
    """Rank 0 misses any other, all miss rank 0, and those who miss nobody are told."""
    everyone = [Node(rank, store.port, world_size=3) for rank in range(3)]
    store.wait([f"grpo/0/{rank}" for rank in range(3)])
    everyone[silent].fellows._over.set()  # without a goodbye
    text, code = everyone[watching].wait()
    assert re.match(rf"grpo: error: node {silent} \(.+\), rank {silent}: no sign of life for \d+ s", text), text
    assert code == 1
    for node in everyone:
        node.fellows.close()


@pytest.mark.usefixtures("quick")
def test_a_node_that_leaves_is_not_missed(store: TCPStore) -> None:
    one, other = Node(0, store.port), Node(1, store.port)
    store.wait(["grpo/0/0", "grpo/0/1"])
    one.fellows.haste()
    other.fellows.close()
    beat = int(store.get("grpo/0/0").split()[0])
    while int(store.get("grpo/0/0").split()[0]) < beat + 40:  # twice what would be too long
        assert not one.ended.is_set()
    one.fellows.close()


@pytest.mark.usefixtures("quick")
def test_the_node_with_the_store_is_missed_with_it() -> None:
    server: list[TCPStore] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    other = Node(1, server[0].port)
    server[0].wait(["grpo/0/1"])
    server.clear()
    text, code = other.wait()
    assert text.startswith("grpo: error: node 0 (127.0.0.1) is gone, and the run with it (") and code == 1
    other.fellows.close()


SLURM = {"SLURM_JOB_ID": "4321", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"}
SLURM |= {"SLURM_NODELIST": "gpu[07,09]", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2", "WORLD_SIZE": "16", "RANK": "9"}
TORCHRUN |= {"GROUP_RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM | {"SLURM_NNODES": "2"}, Meeting("gpu07", 19321, 9, 16, 1, serves=False)),
        (SLURM | {"SLURM_NNODES": "2", "SLURM_PROCID": "0"}, Meeting("gpu07", 19321, 0, 16, 1, serves=True)),
        (SLURM | {"SLURM_NNODES": "1"}, None),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, Meeting("gpu07", 29500, 9, 16, 1, serves=False, start="2")),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_where_nodes_meet(variables: dict[str, str], expected: Meeting | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if re.match("SLURM_|TORCHELASTIC_|MASTER_|GROUP_", name)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", variables.get("MASTER_ADDR", "gpu07"))  # which Lightning sets, once asked
    monkeypatch.setenv("MASTER_PORT", variables.get("MASTER_PORT", "19321"))
    assert Meeting.from_environment() == expected


def test_ranks_of_one_machine_meet_nobody(tmp_path: Path) -> None:
    fellows = FellowRanks(tmp_path, external=True)
    assert fellows.nodes is None
    fellows.close()


def test_a_folder_that_the_nodes_do_not_share_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lightning.ranks.gather", lambda value: [value, value])
    refuse_other_starts(True)
    monkeypatch.setattr("grpo_lightning.ranks.gather", lambda value: [False, value])
    with pytest.raises(UsageError, match=r"rank 1 finds last.ckpt and rank 0 does not.*a disk that all nodes share"):
        refuse_other_starts(True)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_cpu_offload", "FSDPStrategy"])
def test_fsdp1_is_refused_with_the_line_to_use(strategy: str, grpo: Grpo) -> None:
    code, _, errors = grpo("fit", f"--trainer.strategy={strategy}")
    assert code == 2 and re.search(rf"trainer\.strategy=\S*{strategy}: FSDP1", errors), errors
    assert "Use --trainer.strategy fsdp2" in errors and "Traceback" not in errors


def test_a_suspended_run_has_an_exit_code_of_its_own(grpo: Grpo, tmp_path: Path) -> None:
    steps = ["--trainer.max_epochs=3", "--loop.mu=2"]
    signals = ["--trainer.callbacks+=helpers.failing.Signals", "--trainer.callbacks.step=2"]
    before = signal.getsignal(signal.SIGUSR1)
    code, _, errors = grpo("fit", *steps, *signals, "--trainer.callbacks.name=SIGUSR1")
    assert code == 75 and "Traceback" not in errors
    assert signal.getsignal(signal.SIGUSR1) == before
    assert scalars(tmp_path / "run")["optim/updates"] == {0: 2, 1: 2}
    assert grpo("fit", *steps, "--ckpt_path=last")[0] == 0
    assert scalars(tmp_path / "run")["optim/updates"] == {0: 2, 1: 2, 2: 2}
