"""The examples run, and examples/one_step.py makes the updates of `grpo fit`."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from helpers.fast import fit, policy_of
from helpers.fitting import Digits, Gradients, KeepsSamples, relative, scalars
from helpers.loading import load_example
from helpers.paths import ROOT
from helpers.tiny import SPECIAL, prompts_of
from nbclient import execute
from torch import Tensor

from grpo_lightning import (
    FinishReason,
    FrozenCopy,
    MathVerifier,
    Objective,
    Prompt,
    RewardResult,
    Run,
    Sample,
    Sampling,
    Scorer,
)

STEPS, PROMPTS, G, MU = 2, 4, 4, 2
SAMPLING = Sampling(max_new_tokens=12)
LR = 0.5


class Watched(Digits):
    """Notes the prompts of every step, in their order."""

    def __init__(self) -> None:
        super().__init__(name="digits")
        self.prompts: list[list[Prompt]] = []

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        self.prompts.append([sample.prompt for sample in samples[::G]])
        return super().score(samples)


class WatchedSGD(torch.optim.SGD):
    """Notes the gradient of every update, by the parameters' names in a GRPOModule."""

    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__(policy.parameters(), lr=LR)
        self.policy = policy
        self.updates: list[dict[str, Tensor]] = []

    def step(self, closure: Any = None) -> None:
        named = self.policy.named_parameters()
        self.updates.append({f"policy.{name}": p.grad.clone() for name, p in named if p.grad is not None})
        super().step(closure)


def test_one_step_has_the_gradients_of_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, reward = Gradients(), Watched()
    fit(
        tmp_path,
        [gradients],
        {"group_size": G, "prompts_per_step": PROMPTS, "mu": MU},
        trainer={"max_epochs": STEPS},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
        objective=Objective(beta=0.04),
        rewards=[reward],
        sampling=SAMPLING,
    )
    assert len(gradients.updates) == STEPS * MU
    assert len(reward.prompts) == STEPS

    example = load_example("one_step")
    for name, value in {"G": G, "MU": MU, "SAMPLING": SAMPLING}.items():
        monkeypatch.setattr(example, name, value)
    policy, reference = policy_of(scale=0.05), FrozenCopy()
    reference.refresh(policy)
    optimizer = WatchedSGD(policy)
    for step, prompts in enumerate(list(reward.prompts)):
        example.one_step(policy, reference, optimizer, Scorer([Digits()]), prompts, step)
    for expected, actual in zip(gradients.updates, optimizer.updates, strict=True):
        assert sum(float(gradient.abs().sum()) for gradient in expected.values()) > 0
        assert relative(actual, expected) <= 1e-7


def test_one_step_scores_texts_without_the_stop_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stop token is no special token, so that decoding would keep it."""
    example, policy, reference, reward = load_example("one_step"), policy_of(scale=0.05), FrozenCopy(), KeepsSamples()
    monkeypatch.setattr(example, "SAMPLING", Sampling(max_new_tokens=4))
    policy.model.generation_config.eos_token_id = [*range(len(SPECIAL), len(SPECIAL) + 8)]
    reference.refresh(policy)
    example.one_step(policy, reference, WatchedSGD(policy), Scorer([reward]), prompts_of([3, 4]), 0)
    ends = {FinishReason.STOP: -1, FinishReason.LENGTH: None}
    assert {sample.finish_reason for sample in reward.samples} == {*ends}
    for sample in reward.samples:
        written = sample.token_ids[: ends[sample.finish_reason]]
        assert sample.text == policy.tokenizer.decode(written, skip_special_tokens=True)


def test_one_step_learns(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("one_step")
    for name, value in {"STEPS": 2, "PROMPTS": 2, "G": 2}.items():
        monkeypatch.setattr(example, name, value)
    monkeypatch.setattr(sys, "argv", ["one_step.py", str(policy_folder)])
    runs: list[Run] = []
    monkeypatch.setattr(MathVerifier, "setup", lambda self, run: runs.append(run))
    example.main()
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 1", "step 2"]
    assert [run.max_new_tokens for run in runs] == [32]


def test_a_run_as_a_library(policy_folder: Path, tmp_path: Path) -> None:
    metrics = load_example("as_library").train(str(policy_folder), tmp_path, steps=1, prompts=2, questions=2)
    assert {"val/greedy", "val/avg@8", "val/reward"} <= metrics.keys()
    assert (tmp_path / "checkpoints/last.ckpt").exists()
    assert (tmp_path / "policy/model.safetensors").exists()


def test_the_page_on_python_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how_to/python.md").read_text(), re.DOTALL)
    sizes = {"max_epochs=60": 1, "check_val_every_n_epoch=10": 1, "prompts_per_step=32": 2, "val_limit=256": 2}
    for size, small in sizes.items():
        assert code.count(size) == 1
        code = code.replace(size, f"{size.partition('=')[0]}={small}")
    exec(compile(code, "docs/how_to/python.md", "exec"), {"__name__": "__main__"})
    assert re.search(r"tensor\(\d", capsys.readouterr().out)
    folder = tmp_path / "runs/in_python"
    assert (folder / "checkpoints/last.ckpt").exists() and (folder / "policy/config.json").exists()
    assert {"policy/objective", "optim/grad_norm", "reward/brief/mean"} <= scalars(folder).keys()


def test_the_notebook_runs(tmp_path: Path) -> None:
    """With ipykernel, which it starts."""
    execute(nbformat.read(ROOT / "docs/notebooks/quickstart.ipynb", 4), tmp_path)
