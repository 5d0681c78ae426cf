"""Whole runs on a CPU that calls itself a GPU: devices, waits of the host, and kernels per decoded position."""

import json
import subprocess
import sys
from typing import Any

import pytest
from helpers.command import LETTERS, arguments, furnish
from helpers.paths import environment
from make_seeing_policy import make_model, make_processor
from PIL import Image

GPU = [
    "--trainer.accelerator=gpu",
    "--trainer.devices=1",
    "--trainer.limit_val_batches=0",
    "--trainer.enable_checkpointing=false",
    "--trainer.logger=false",
    "--inspect.every_n_steps=0",
    LETTERS,
]
MIXED = "--trainer.precision=bf16-mixed"
LORA = ["--model.policy.adapter=LoRA", "--model.policy.adapter.rank=4", "--model.optimizer.lr=1e-4"]

RUNS: dict[str, tuple[int, list[str]]] = {
    "32-true": (62, []),
    "bf16-mixed": (76, [MIXED, "--model.optimizer=torch.optim.AdamW", "--model.optimizer.fused=true"]),
    "16-mixed": (76, ["--trainer.precision=16-mixed"]),
    "bfloat16 weights": (65, ["--model.policy.dtype=bfloat16"]),
    "float32 head": (74, [MIXED, "--model.policy.float32_head=true"]),
    "LoRA": (150, [MIXED, *LORA, "--model.objective.beta=0.04"]),
    "LoRA on bfloat16 weights": (149, ["--model.policy.dtype=bfloat16", *LORA]),
    "rows, filtered": (
        62,
        ["--model.policy.compute.share_prefix=false", "--model.sampling.top_p=0.9", "--model.sampling.top_k=20"],
    ),
    "Compute and PlainEngine": (0, ["--model.policy.compute=Compute", "--model.engine=PlainEngine", MIXED]),
    "deterministic": (62, ["--trainer.deterministic=true", "--model.sampling.top_p=0.9"]),
    "GSPO that stops": (
        62,
        [
            "--model.objective.surrogate=SequenceClipped",
            "--loop.stop=KLAbove",
            "--loop.mu=2",
            "--loop.num_minibatches=2",
            "--loop.max_tokens=40",
        ],
    ),
    "images": (
        76,
        [
            MIXED,
            "--model.policy.path=seeing",
            "--model.policy.vision=true",
            "--data.task.images=image",
            "--data.task.train=images.jsonl",
            "--model.objective.beta=0.04",
            "--loop.mu=2",
        ],
    ),
    "validated and recorded": (
        76,
        [MIXED, "--trainer.limit_val_batches=2", "--inspect.every_n_steps=1", "--model.objective.beta=0.04"],
    ),
}
"""Kernels of a decoded position of two layers, at most, and options. Prompts differ in length."""

# GradScaler asks for its scale and whether a gradient overflowed.
UPDATE_WAITS = dict.fromkeys(RUNS, 3) | {"16-mixed": 6}
# transformers reads positions where it makes the mask. The package's own attention needs none.
# A trained encoder reads images anew: pixels go to the device, and the model counts its image tokens.
MICRO_BATCH_WAITS = dict.fromkeys(RUNS, 0) | {"Compute and PlainEngine": 1, "images": 20}


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run counted, by its name."""
    folder = tmp_path_factory.mktemp("fake_gpu")
    furnish(folder, {"1": 1, "22": 2, "333": 3, "4444": 4})
    processor = make_processor()
    make_model(processor, hidden=64, layers=2).save_pretrained(folder / "seeing")
    processor.save_pretrained(folder / "seeing")
    Image.new("RGB", (24, 24), "red").save(folder / "red.png")
    rows = [{"question": "1" * row, "answer": "1", "image": "red.png" if row % 2 else None} for row in range(1, 5)]
    (folder / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = {name: arguments("fit", *GPU, *options) for name, (_, options) in RUNS.items()}
    process = subprocess.run(
        [sys.executable, "-m", "fake_gpu"],
        input=json.dumps(runs),
        cwd=folder,
        env=environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    return {line["name"]: line for line in lines} | {"stderr": process.stderr}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_keeps_devices_apart_and_never_waits_for_a_position(name: str, noted: dict[str, Any]) -> None:
    run = noted[name]
    assert run["error"] == "", run["text"][-2000:]
    calls, waits = run["calls"], run["waits"]
    assert calls["update"] and calls["micro_batch"]
    for phase in ("position", "draw", "validation metrics"):
        assert waits.get(phase, {}) == {}
    for phase, max_waits in (("micro_batch", MICRO_BATCH_WAITS[name]), ("update", UPDATE_WAITS[name])):
        assert sum(waits.get(phase, {}).values()) <= max_waits * calls[phase], waits[phase]
    assert run["cudnn_calls"] == run["bool_masks"] == 0


def test_runs_in_float32_say_once_what_bf16_mixed_would_gain(noted: dict[str, Any]) -> None:
    in_float32 = ("32-true", "rows, filtered", "deterministic", "GSPO that stops")
    assert noted["stderr"].count("trainer.precision=bf16-mixed takes") == len(in_float32)


def test_rows_are_copied_once_however_many_are_recorded(noted: dict[str, Any]) -> None:
    waits = noted["validated and recorded"]["waits"]["inspector"]
    assert all(line.startswith(("copy from the GPU", "tolist")) for line in waits)
    assert sum(waits.values()) <= 20


@pytest.mark.parametrize("name", [name for name, (kernels, _) in RUNS.items() if kernels])
def test_a_position_takes_no_more_kernels_than_before(name: str, noted: dict[str, Any]) -> None:
    run = noted[name]
    assert run["kernels"]["position"] / run["calls"]["position"] <= RUNS[name][0]
