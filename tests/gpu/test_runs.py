"""Whole runs of the command line on GPUs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import LEARNS, Grpo, arguments, furnish
from helpers.fitting import scalars
from helpers.paths import environment

GPU = ["--trainer.accelerator=gpu", "--trainer.devices=1"]
LEARNING = [
    *LEARNS,
    "--trainer.max_epochs=2",
    "--model.optimizer.lr=0.01",
    "--model.sampling.max_new_tokens=12",
    "--loop.max_tokens=60",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Those of the policy in a checkpoint, on the CPU."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
    return {name: value for name, value in state.items() if name.startswith("policy.")}


RUNS: dict[str, list[str]] = {
    "32-true": [],
    "bf16-mixed": ["--trainer.precision=bf16-mixed"],
    "bfloat16 weights": ["--model.policy.dtype=bfloat16"],
    "rows": ["--model.policy.compute.share_prefix=false"],
    "deterministic": ["--trainer.deterministic=true"],
    "deterministic, filtered": ["--trainer.deterministic=true", "--model.sampling.top_p=0.9"],
    "PlainEngine": ["--model.engine=PlainEngine"],
    "recomputed activations": ["--model.policy.compute.gradient_checkpointing=true"],
    "GSPO that stops": [
        "--model.objective.surrogate=SequenceClipped",
        "--loop.stop=KLAbove",
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu(name: str, folder: Path, command: Grpo) -> None:
    command.ok("fit", *GPU, *LEARNING, *RUNS[name])
    logged = scalars(folder / "run")
    assert max(logged["policy/objective"]) >= 3
    assert all(value == value for value in logged["optim/grad_norm"].values())
    assert "optim/bad_updates" not in logged


def test_a_run_goes_on_where_it_stopped(folder: Path, command: Grpo) -> None:
    last = "--ckpt_path=last"
    whole, half = "--trainer.default_root_dir=whole", "--trainer.default_root_dir=half"
    deterministic = "--trainer.deterministic=true"
    for line in (
        ["fit", whole],
        ["fit", half, "--trainer.max_epochs=1"],
        ["fit", half, last],
        ["validate", half, last],
        ["predict", half, last, "--data.task.predict=rows.jsonl"],
    ):
        options = [option for option in (*GPU, *LEARNING, deterministic) if option.split("=")[0] not in " ".join(line)]
        command.ok(*line, *options)
    expected, actual = (weights(folder / name / "checkpoints" / "last.ckpt") for name in ("whole", "half"))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_gpus_learn_what_one_learns(strategy: str, folder: Path) -> None:
    """NCCL. Gradients are sums over ranks, so the weights agree to rounding; the drawn tokens are the same."""
    runs = {"one": ["--trainer.devices=1"], "two": ["--trainer.devices=2", f"--trainer.strategy={strategy}"]}
    for name, devices in runs.items():
        options = ["--trainer.accelerator=gpu", f"--trainer.default_root_dir={name}", *LEARNING, *devices]
        run: Any = subprocess.run(
            [sys.executable, "-m", "grpo_lightning", *arguments("fit", *options)],
            cwd=folder,
            env=environment(HF_HUB_OFFLINE="1"),
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert run.returncode == 0, run.stderr[-3000:]
    one, two = (weights(folder / name / "checkpoints" / "last.ckpt") for name in runs)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
