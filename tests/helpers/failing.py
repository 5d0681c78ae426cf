"""A callback that makes one rank fail in one phase of a run."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import lightning as L

from grpo_lightning import GRPOModule, Reward, RewardResult, Sample, UsageError
from helpers.waiting import LIMIT


class Fails(L.Callback):
    """Raises on one rank.

    Args:
        phase: Where.
        rank: On which rank; -1 is all.
        kind: What: `usage`, `bug`, or `kill` for a process that just ends.
        others_wait: Whether the other ranks wait there, for much longer than a test.
        step: The first exploration step in which it does.
    """

    def __init__(self, phase: str, rank: int = 1, kind: str = "bug", others_wait: bool = False, step: int = 1) -> None:
        self.phase, self.rank, self.kind, self.others_wait, self.step = phase, rank, kind, others_wait, step

    def _in(self, phase: str, trainer: L.Trainer) -> None:
        if phase != self.phase or trainer.current_epoch + 1 < self.step:
            return
        if self.rank in (-1, trainer.global_rank):
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "usage":
                raise UsageError("data.task=x: a mistake; give y")
            raise ZeroDivisionError("the true reason")
        if self.others_wait:
            time.sleep(10 * LIMIT)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._in("setup", trainer)
        assert isinstance(pl_module, GRPOModule)
        explorer = pl_module.explorer
        generate = explorer.engine.generate

        def failing_generate(*args: Any, **kwargs: Any) -> Any:
            self._in("exploring", trainer)
            return generate(*args, **kwargs)

        explorer.engine.generate = failing_generate  # type: ignore[method-assign]

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self._in("updating", trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, *args: Any) -> None:
        self._in("saving", trainer)


class OneBadQuestion(Reward):
    """Fails on every completion of the first row."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        if any(sample.answer == "1" for sample in samples):
            raise ValueError("a bad row")
        return RewardResult([float(len(sample.text)) for sample in samples], ["ok"] * len(samples))


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
