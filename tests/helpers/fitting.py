"""A whole tiny training run in a second: task, reward, and what was seen on the way."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_lightning import Compute, GRPOLoop, Guard, Policy, Reward, Rollouts, Sampling, StopRule, Task, TaskData
from grpo_lightning.engines import trial
from grpo_lightning.engines.engine import RolloutEngine
from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.step import Minibatch, Step
from grpo_lightning.maths.objective import Objective
from grpo_lightning.policy.sharding import assembled
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.training.checkpoint_files import AtomicCheckpointIO
from grpo_lightning.training.evaluation import Validation
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import Question, Sample
from helpers.tiny import gradients, policy_of


class Echo(Task):
    """Questions of different lengths; the answer is the first character."""

    def questions(self, split: str) -> list[Question]:
        texts = ["3" * (1 + row % 5) + "ab" for row in range(24)]
        return [Question(text, answer=text[0], source=f"echo:{row}") for row, text in enumerate(texts)]


class Digits(Reward):
    """The fraction of characters that are digits, or what `change` makes of the sample and this fraction."""

    finds_answers = True

    def __init__(
        self, weight: float = 1.0, name: str | None = None, change: Callable[[Sample, float], float] | None = None
    ) -> None:
        super().__init__(weight, name)
        self.change = change

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        shares = [sum(c.isdigit() for c in sample.text) / max(1, len(sample.text)) for sample in samples]
        values = [*map(self.change, samples, shares)] if self.change else shares
        return RewardResult(values, answer=[sample.text for sample in samples])


class EarlyDigits(Digits):
    """As `Digits`, while other completions are still sampled."""

    scores_early = True


class KeepsSamples(Digits):
    """Keeps the samples that it scored."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        self.samples += samples
        return super().score(samples)


class Exact(Reward):
    """1 where what follows `####`, or stands in `<answer>` or `\\boxed{}`, is the gold answer: a small verifier."""

    finds_answers = scores_early = True

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        found = [re.search(r"(?:#### |<answer>|boxed\{)(\w+)", sample.text) for sample in samples]
        answers = [None if one is None else one[1] for one in found]
        values = [
            float(answer == sample.answer) if sample.answer.isalnum() else math.nan
            for sample, answer in zip(samples, answers, strict=True)
        ]
        statuses = [
            "gold_bad" if math.isnan(value) else "ok" if answer else "no_answer"
            for value, answer in zip(values, answers, strict=True)
        ]
        return RewardResult(values, statuses, answers)


class Product(Reward):
    """The product of the values of two rewards: one that has rewards inside it."""

    def __init__(self, first: Reward, second: Reward, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.parts = first, second
        self.scores_early = first.scores_early and second.scores_early

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        first, second = (factor(samples) for factor in self.parts)
        values = [left * right for left, right in zip(first.value, second.value, strict=True)]
        statuses = [min(pair, key="ok".__eq__) for pair in zip(first.status, second.status, strict=True)]
        return RewardResult(values, statuses, second.answer)


@dataclass
class Gradients(L.Callback):
    """The gradient of every parameter at every optimizer update, as the optimizer sees it, whole if it is sharded."""

    updates: list[dict[str, Tensor]] = field(default_factory=list)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        grads = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        self.updates.append({name: assembled(grad).clone() for name, grad in grads.items()})


class Steps(L.Callback):
    """The steps of a run, as they ended."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps.append(GRPOLoop.find(trainer).current_step)

    @property
    def explorations(self) -> list[Exploration]:
        return [step.exploration for step in self.steps]


class Minibatches(L.Callback):
    """The minibatches of a run, as the update saw them."""

    def __init__(self) -> None:
        self.seen: list[Minibatch] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Minibatch, batch_idx: int
    ) -> None:
        self.seen.append(batch)


class Another(FrozenCopy):
    """A reference that is not the policy, whose KL term would be 0."""

    @torch.no_grad()
    def refresh(self, policy: Policy) -> None:
        super().refresh(policy)
        for parameter in self.policy.parameters():
            parameter.mul_(1.2)


class Shares(L.Callback):
    """Writes `share-RANK.txt`: how many of the policy's numbers this rank holds, of how many; the reference's too."""

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        counts = []
        for name in ("policy", "reference"):
            parameters = list(getattr(pl_module, name).parameters())
            held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
            counts += [held, sum(p.numel() for p in parameters)]
        Path(trainer.default_root_dir, f"share-{trainer.global_rank}.txt").write_text(" ".join(map(str, counts)))


class EachUpdate(L.Callback):
    """Writes `updates.jsonl` on rank 0: the metrics of each update of a step, of which the run logs one point."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and Path(trainer.default_root_dir).is_dir():
            step = GRPOLoop.find(trainer).current_step
            found = [{name: float(value) for name, value in metrics.items()} for _, metrics in step.updates]
            with Path(trainer.default_root_dir, "updates.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")


def of_updates(folder: Path | str, name: str) -> list[list[float]]:
    """A metric of each update, made or refused, step by step."""
    steps = [json.loads(line) for line in Path(folder, "updates.jsonl").read_text().splitlines()]
    return [[metrics[name] for metrics in step] for step in steps]


class AfterOne(StopRule):
    """Ends the passes after one update."""

    def __call__(self, updates: Sequence[Any], num_minibatches: int) -> bool:
        return True


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain steps, large enough to move the tiny policy."""
    return torch.optim.SGD(parameters, lr=0.5)


Kinds = tuple[type[Compute], type[RolloutEngine], type[TaskData]]


def fit(
    folder: Path | str,
    callbacks: Sequence[L.Callback] = (),
    loop: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    ckpt_path: str | Path | None = None,
    data: TaskData | None = None,
    kinds: Kinds = (Compute, PlainEngine, TaskData),
    **module: Any,
) -> GRPOModule:
    """Fits a tiny Llama, whose weights are about as large as a new model's, for 3 steps of 4 x 4 completions.

    The engine's trial before the run is left out: it takes a third of so small a run, and has tests of its own.
    """
    grpo, fitting = made(folder, callbacks, loop, trainer, kinds, **module)
    with mock.patch.object(trial, "fault", return_value=""):
        fitting.fit(grpo, datamodule=data or kinds[2](Echo(), val_batch_size=5), ckpt_path=ckpt_path)
    return grpo


def made(
    folder: Path | str,
    callbacks: Sequence[L.Callback] = (),
    loop: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    kinds: Kinds = (Compute, PlainEngine, TaskData),
    **module: Any,
) -> tuple[GRPOModule, L.Trainer]:
    """The module and the trainer of `fit`."""
    compute, engine, _ = kinds
    sizes = {"group_size": 4, "prompts_per_step": 4} | (loop or {})
    settings: dict[str, Any] = {
        "policy": policy_of(scale=0.05, compute=compute),
        "rewards": [Digits()],
        "engine": engine(),
        "sampling": Sampling(max_new_tokens=12),
        "optimizer": sgd,
        "grad_clip": 0.0,
        "samples": 2,
    }
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "logger": TensorBoardLogger(folder, name="", version=""),
        "default_root_dir": folder,
        "plugins": [AtomicCheckpointIO()],
    }
    parts = {"callbacks": [*callbacks, GRPOLoop(**sizes), EachUpdate()]}
    return GRPOModule(**grouped(settings | module)), L.Trainer(**options | parts | (trainer or {}))


def resumes_exactly(folder: Path, options: Callable[[], dict[str, Any]], steps: int = 3, cut: int = 1) -> None:
    """A run in `whole` and one in `cut` that is cut after some steps and goes on end alike, to the bit.

    Args:
        folder: Where both are.
        options: Makes the arguments of `fit`, anew for each start.
        steps: Of both.
        cut: Steps before the cut.
    """
    for name, end, path in (("whole", steps, None), ("cut", cut, None), ("cut", steps, "last")):
        given = options()
        trainer = {"max_epochs": end} | given.pop("trainer", {})
        callbacks = [StepCheckpoint(), *given.pop("callbacks", [])]
        fit(folder / name, callbacks, trainer=trainer, ckpt_path=path, **given)
    assert same(folder / "whole", folder / "cut")
    assert repr(scalars(folder / "whole")) == repr(scalars(folder / "cut"))  # NaN is not equal to itself


def same(a: Path, b: Path) -> bool:
    """Whether two runs ended with the same weights, and the same states of optimizer and schedule."""
    checkpoints = [checkpoint_of(folder) for folder in (a, b)]
    states = [str((one["optimizer_states"][0]["state"], one["lr_schedulers"])) for one in checkpoints]
    return equal(*(one["state_dict"] for one in checkpoints)) and states[0] == states[1]


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether these are the same tensors by name, to the bit."""
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def grouped(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of GRPOModule, some of which are given as those of its `guard` and `validation`."""
    settings = {**settings}
    for name, kind in (("guard", Guard), ("validation", Validation)):
        if own := ({field.name for field in fields(kind)} - {"sampling"}) & settings.keys():
            settings |= {name: replace(settings.get(name) or kind(), **{key: settings.pop(key) for key in own})}
    return settings


CLOCK = ("time/", "perf/", "async/")


def scalars(folder: Path | str, without: tuple[str, ...] = CLOCK) -> dict[str, dict[int, float]]:
    """Every scalar in a run's event files by name and step; what several files say of a step must agree.

    Those of the clock are left out.
    """
    found: dict[str, dict[int, float]] = {}
    for name, all_points in points(folder, without).items():
        for step, value in all_points:
            seen = found.setdefault(name, {}).setdefault(step, value)
            assert seen == value or (math.isnan(seen) and math.isnan(value)), f"{name} at {step}: {seen} and {value}"
    return {name: dict(sorted(steps.items())) for name, steps in sorted(found.items())}  # `repr` shows the order


def points(folder: Path | str, without: tuple[str, ...] = CLOCK) -> dict[str, list[tuple[int, float]]]:
    """As `scalars`, with every point of a step: validations between its updates stand at the same x."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(Path(folder).glob("events.out.tfevents.*")):
        events = events_of(file)
        for name in events.Tags()["scalars"]:
            if not name.startswith(without):
                found.setdefault(name, []).extend((event.step, event.value) for event in events.Scalars(name))
    return found


def events_of(folder: Path | str) -> EventAccumulator:
    """All that TensorBoard finds in a folder, or in one file."""
    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "histograms": 0, "scalars": 0}).Reload()


def charts_of(folder: Path) -> list[layout_pb2.Chart]:
    """The charts on TensorBoard's page Custom Scalars."""
    (event,) = events_of(folder).Tensors("custom_scalars__config__")
    (category,) = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category
    assert category.title == "First look"
    return [*category.chart]


def checkpoint_of(folder: Path | str) -> dict[str, Any]:
    """The last checkpoint of a run."""
    return torch.load(Path(folder, "checkpoints", "last.ckpt"), weights_only=True)


def weights_of(folder: Path | str) -> dict[str, Tensor]:
    """The weights in the last checkpoint of a run."""
    return checkpoint_of(folder)["state_dict"]


def gradient_of(policy: Policy, objective: Objective, micro_batches: Sequence[Rollouts]) -> dict[str, Tensor]:
    """The gradient of an update of these micro-batches."""
    policy.zero_grad()
    for micro_batch in micro_batches:
        scored = policy(micro_batch)
        objective(scored.logp, scored.entropy, micro_batch)[0].backward()
    return dict(gradients(policy))


def relative(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """|a - b| / |b| over all parameters together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    return (difference / sum(float(b[name].double().square().sum()) for name in b)) ** 0.5
