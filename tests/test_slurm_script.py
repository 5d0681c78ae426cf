"""examples/slurm.sh with stand-ins for what SLURM has: when it requeues."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT, environment
from helpers.waiting import LIMIT, wait_until

SCRIPT = ROOT / "examples" / "slurm.sh"
JOB = "4321"
FOLDER = Path("runs", JOB)


class Cluster:
    """A folder with programs called srun, scontrol and grpo."""

    def __init__(self, folder: Path, srun: str, state: str = "RUNNING") -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        scontrol = f'echo "$*" >> {folder}/scontrol.log; echo "   JobState={state} Reason=None"'
        for name, text in {
            "srun": srun,
            "scontrol": scontrol,
            "grpo": f'exec {sys.executable} -m grpo_lightning "$@"',
        }.items():
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
        slurm = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NAME": "grpo", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
        slurm |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1"}
        self.variables = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE") | slurm
        self.variables["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        for name in ("RUN", "MASTER_PORT", "SLURM_RESTART_COUNT"):
            self.variables.pop(name, None)

    def start(self, *options: str, **more: str) -> subprocess.Popen[str]:
        """The script, as sbatch would start it."""
        return subprocess.Popen(
            ["bash", SCRIPT, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.variables | more,
        )

    @property
    def requeued(self) -> int:
        """How often the job has been requeued."""
        log = self.folder / "scontrol.log"
        return log.read_text().splitlines().count(f"requeue {JOB}") if log.exists() else 0


SAVES = f"mkdir -p {FOLDER}/checkpoints; touch -d '+1 minute' {FOLDER}/checkpoints/last.ckpt; "
SAVED_BEFORE = f"mkdir -p {FOLDER}/checkpoints; touch -d '-1 minute' {FOLDER}/checkpoints/last.ckpt; "


@pytest.mark.parametrize(
    ("srun", "state", "requeued"),
    [
        ("exit 0", "RUNNING", 0),
        ("exit 75", "RUNNING", 1),
        (SAVES + "exit 1", "RUNNING", 1),
        (SAVED_BEFORE + "exit 1", "RUNNING", 0),
        ("exit 2", "RUNNING", 0),
        ("exit 75", "CANCELLED", 0),
    ],
    ids=["done", "suspended", "failed later", "failed at once again", "a mistake", "cancelled"],
)
def test_when_it_requeues(tmp_path: Path, srun: str, state: str, requeued: int) -> None:
    cluster = Cluster(tmp_path, srun, state)
    job = cluster.start()
    output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == int(srun[-2:])
    assert cluster.requeued == requeued, output


def test_sigterm_suspends_the_run(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "trap 'kill %1; exit 75' USR1; sleep 3000 & echo \"$*\" > ready; wait")
    job = cluster.start("--loop.mu", "2")
    wait_until((tmp_path / "ready").exists)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 75 and cluster.requeued == 1, output
    asked = (tmp_path / "ready").read_text()
    assert "grpo fit --loop.mu 2 --trainer.num_nodes 2 " in asked and asked.endswith("--ckpt_path last\n")
