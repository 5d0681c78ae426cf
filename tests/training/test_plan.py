"""`grpo plan`, the table at the start of a fit, and what is said when memory runs out."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_lightning.training.callbacks.memory import (
    PHASE_OF,
    is_out_of_memory,
    out_of_memory_message,
    phase_of,
)
from grpo_lightning.training.job import spread_of
from grpo_lightning.training.memory import PHASES, Spread
from grpo_lightning.training.plan import Planner, device_bytes
from helpers.command import Grpo
from helpers.paths import ROOT
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from grpo_lightning.cli import run
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.policy.policy import Policy
from grpo_lightning.training.loop import GRPOLoop
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.strategy import FSDP2Strategy

CONFIGS = ROOT / "configs"


@pytest.fixture
def folder(tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: questions and a model."""
    rows = [f'{{"question": "{"1" * length}", "answer": "1"}}' for length in (2, 17, 5, 8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    shutil.copytree(policy_folder, tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


def test_a_plan_says_what_a_run_would_hold_and_writes_nothing(command: Grpo, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    code, out, errors = command("plan")
    assert code == 0, errors
    assert "longest prompt 17 tokens (of the training questions)" in out
    for name in ("process", "weights", "gradients", "optimizer", "key-value cache", "activations", "logits", "sum"):
        assert row(out, name)
    assert "the peak is" in out and "it fits" in out
    assert sorted(folder.rglob("*")) == before


def test_a_plan_needs_none_of_the_devices(command: Grpo, folder: Path) -> None:
    options = ("--trainer.accelerator=gpu", "--trainer.devices=8", "--trainer.num_nodes=2", "--prompt_tokens=30")
    code, out, errors = command("plan", *options, "--trainer.strategy=fsdp2", "--loop.prompts_per_step=16")
    assert code == 0, errors
    assert "longest prompt 30 tokens (--prompt_tokens)" in out
    assert "memory of each of 16 devices" in out
    assert "gathered weights" in out and "of 16 shards" in out
    if not torch.cuda.is_available():
        assert "give --memory_gib to compare it with a device" in out


def test_what_does_not_fit_names_the_keys_that_help(command: Grpo, folder: Path) -> None:
    code, out, errors = command("plan", "--memory_gib=0.001", "--model.sampling.max_new_tokens=100")
    assert code == 0, errors
    verdict, *helps = out[out.index("the peak is") :].splitlines()
    assert "it does not fit 1.0 MiB" in verdict
    assert any("loop.max_tokens=" in line and "saves" in line for line in helps)
    saved = [float(line.split(" saves ")[1].split()[0]) for line in helps]
    assert min(saved) > 0
    tried = [line.split()[1] for line in errors.splitlines() if line.startswith("  trying ")]
    found = [line.split()[0] for line in helps]
    assert found == [key for key in tried if key in found]  # each as it is found
    assert tried[-1] == "model.policy.dtype=bfloat16"  # nothing of the estimate stays: the last


def test_a_prompt_that_is_not_known_is_assumed_and_said(command: Grpo, folder: Path) -> None:
    (folder / "rows.jsonl").unlink()
    code, out, errors = command("plan")
    assert code == 0, errors
    assert "longest prompt 512 tokens (assumed; give --prompt_tokens." in out


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--memory_gib=0", "memory_gib=0"),
        ("--prompt_tokens=0", "prompt_tokens=0"),
        ("--trainer.strategy=nothing", "trainer.strategy=nothing"),
        ("--model.policy.path=./nowhere", "no such folder"),
        ("--loop.group_size=1", "group_size"),
    ],
)
def test_mistakes_in_a_plan(option: str, says: str, command: Grpo, folder: Path) -> None:
    code, _, errors = command("plan", option)
    assert code == 2
    assert says in errors and "Traceback" not in errors


@pytest.mark.parametrize("name", ["quickstart.yaml", "gsm8k_qwen2.5_0.5b.yaml"])
def test_the_configurations_can_be_planned(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["grpo"])
    run(["plan", "--config", str(CONFIGS / name), "--model.policy.path=./policy", "--prompt_tokens=20"])
    assert "the peak is" in capsys.readouterr().out


def test_the_configuration_of_a_run_can_be_planned(
    command: Grpo, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, config, errors = command("fit", "--ckpt_path=last", "--print_config")
    assert code == 0, errors
    (folder / "config.yaml").write_text(config)
    run(["plan", "--config=config.yaml"])
    assert "the peak is" in capsys.readouterr().out


def settings(**changes: Any) -> Any:
    trainer = {"accelerator": "gpu", "devices": "auto", "strategy": "auto", "num_nodes": 1} | changes
    return type("Settings", (), trainer)()


@pytest.mark.parametrize(
    ("devices", "expected"), [(3, 3), ("3", 3), ([0, 2], 2), ("0,2", 2), ("0,", 1), ("auto", 1), (-1, 1)]
)
def test_devices_as_the_trainer_reads_them(devices: Any, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert Planner(settings(devices=devices), GRPOLoop()).num_devices == expected


def test_how_strategies_lay_out_weights() -> None:
    assert spread_of(SingleDeviceStrategy, 1) == Spread(1, 1, False)
    assert spread_of(DDPStrategy, 4) == Spread(4, 1, True)
    assert spread_of(FSDP2Strategy, 4) == Spread(4, 4, False)
    assert Planner(settings(), GRPOLoop()).strategy(1) is SingleDeviceStrategy
    assert Planner(settings(), GRPOLoop()).strategy(2) is DDPStrategy
    assert Planner(settings(strategy="fsdp2"), GRPOLoop()).strategy(2) is FSDP2Strategy
    assert Planner(settings(strategy=FSDP2Strategy()), GRPOLoop()).strategy(2) is FSDP2Strategy


def test_processes_share_the_memory_of_a_machine() -> None:
    whole = device_bytes("cpu", 1)
    assert whole is not None and whole > 2**28
    assert device_bytes("cpu", 4) == whole / 4


def test_a_fit_says_it_before_the_first_step(
    command: Grpo, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    monkeypatch.setattr("grpo_lightning.training.callbacks.memory.rank_zero_info", tables.append)
    sampled = NativeEngine.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        assert len(tables) == 1
        return sampled(*args, **kwargs)

    monkeypatch.setattr(NativeEngine, "generate", generate)
    code, _, errors = command("fit", "--memory.show=true", "--trainer.limit_val_batches=0")
    assert code == 0, errors
    assert row(tables[0], "weights")[1] == row(tables[0], "weights")[3] != "-"
    assert command("fit", "--trainer.default_root_dir=other")[0] == 0
    assert len(tables) == 1


class OutOfMemory(RuntimeError):
    """As torch's CPU allocator says it."""

    def __init__(self) -> None:
        super().__init__("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 9 bytes")


def failing(*args: Any, **kwargs: Any) -> Any:
    raise OutOfMemory


@pytest.mark.parametrize(
    ("owner", "name", "phase", "key"),
    [
        (GRPOModule, "_backward", "updating", "loop.max_tokens="),
        (NativeEngine, "generate", "exploring", "model.engine.max_rows="),
        (GRPOModule, "_evaluate", "validating", "What helps: "),
    ],
)
def test_out_of_memory_ends_with_the_table_the_phase_and_the_key(
    owner: type, name: str, phase: str, key: str, command: Grpo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, failing)
    code, _, errors = command("fit", "--model.sampling.max_new_tokens=60", "--loop.validate_first=false")
    assert code == 1, errors
    assert "Traceback" not in errors
    message = errors[errors.index("grpo: error: out of memory") :]
    assert "can't allocate memory" in message.splitlines()[0]
    assert message.splitlines()[1] == f"It happened in this phase: {phase}."
    assert row(message, "weights") and row(message, "sum")
    assert "What helps: " in message and key in message


def test_out_of_memory_before_the_run_points_to_the_plan(
    command: Grpo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "check", failing)
    code, _, errors = command("fit")
    assert code == 1
    assert "grpo: error: out of memory" in errors and "`grpo plan`" in errors and "Traceback" not in errors


def test_torch_and_python_say_that_memory_ran_out_in_several_ways() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OutOfMemory())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert out_of_memory_message(MemoryError()).splitlines()[0] == "out of memory: MemoryError"


def test_phases_are_known_by_what_is_on_the_stack() -> None:
    assert set(PHASES) <= {*PHASE_OF.values()}
    assert phase_of(None) == "another part of the run"
    with pytest.raises(AttributeError) as raised:
        GRPOModule.training_step(None, None, 0)  # type: ignore[arg-type]
    assert phase_of(raised.value.__traceback__) == "updating"


def test_a_model_that_cannot_be_planned_is_said_so(
    command: Grpo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_lightning.training.memory.Twin.update", lambda *args: [][0])
    code, _, errors = command("plan")
    assert code == 2
    assert "the memory of llama cannot be planned (list index out of range)" in errors
    tables: list[str] = []
    monkeypatch.setattr("grpo_lightning.training.callbacks.memory.rank_zero_info", tables.append)
    assert command("fit", "--memory.show=true", "--trainer.limit_val_batches=0")[0] == 0
    assert tables == ["memory: not known for llama (list index out of range)"]


def test_a_plan_and_a_fit_agree_that_the_prefix_is_shared(
    command: Grpo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[str] = []
    monkeypatch.setattr("grpo_lightning.training.callbacks.memory.rank_zero_info", tables.append)
    options = ("--loop.group_size=8", "--model.sampling.max_new_tokens=16", "--trainer.limit_val_batches=0")
    code, out, errors = command("plan", *options)
    assert code == 0, errors
    assert command("fit", "--memory.show=true", *options)[0] == 0
    for name in ("activations", "logits"):
        assert row(out, name) == row(tables[0], name)
