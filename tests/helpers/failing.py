"""A callback that makes one rank fail in one phase of a run."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from grpo_lightning.rewards.base import Reward, RewardFailure
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import Sample, UsageError


class Fails(L.Callback):
    """Raises on one rank.

    Args:
        phase: Where.
        rank: On which rank; -1 is all.
        kind: What: `usage`, `reward`, `memory`, `bug`, `interrupt`, or `kill` for a process that just ends.
    """

    def __init__(self, phase: str, rank: int = 1, kind: str = "bug") -> None:
        self.phase, self.rank, self.kind = phase, rank, kind

    def _in(self, phase: str, trainer: L.Trainer) -> None:
        if phase == self.phase and self.rank in (-1, trainer.global_rank):
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {
                "usage": UsageError("data.task=x: a mistake; give y"),
                "reward": RewardFailure("reward r failed on 2 of 2 samples"),
                "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
                "bug": ZeroDivisionError("the true reason"),
                "interrupt": KeyboardInterrupt(),
            }[self.kind]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._in("setup", trainer)
        assert isinstance(pl_module, GRPOModule)
        explorer = pl_module.explorer
        generate, check = explorer.engine.generate, explorer.scorer.stop_if_broken

        def failing_generate(*args: Any, **kwargs: Any) -> Any:
            self._in("exploring", trainer)
            return generate(*args, **kwargs)

        def failing_check(*args: Any) -> None:
            self._in("scoring", trainer)
            check(*args)

        explorer.engine.generate = failing_generate  # type: ignore[method-assign]
        explorer.scorer.stop_if_broken = failing_check  # type: ignore[method-assign]

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self._in("updating", trainer)

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._in("validating", trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, *args: Any) -> None:
        self._in("saving", trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._in("ending", trainer)


class OneBadQuestion(Reward):
    """Fails on every completion of the first row."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        if any(sample.answer == "1" for sample in samples):
            raise ValueError("a bad row")
        return RewardResult([float(len(sample.text)) for sample in samples], ["ok"] * len(samples))


class Dies(L.Callback):
    """Kills the last rank before a step is saved, when everything else of the step is written.

    Args:
        step: Which, counted from 1.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save_checkpoint(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch + 1 == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Signals(L.Callback):
    """Sends a signal to one rank in a step, before its first update.

    Args:
        name: Such as SIGUSR1.
        step: Which, counted from 1.
        rank: To which rank.
    """

    def __init__(self, name: str, step: int, rank: int = 0) -> None:
        self.number = signal.Signals[name]
        self.step, self.rank = step, rank

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch + 1, trainer.global_rank, batch_idx) == (self.step, self.rank, 0):
            os.kill(os.getpid(), self.number)
