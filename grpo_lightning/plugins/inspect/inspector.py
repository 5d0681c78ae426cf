"""The callback that records, token by token, what a step's updates did."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from grpo_lightning import ranks
from grpo_lightning.plugins.inspect.candidates import Candidates
from grpo_lightning.plugins.inspect.following import Followed
from grpo_lightning.plugins.inspect.measuring import Measure
from grpo_lightning.plugins.inspect.movement import Movement
from grpo_lightning.plugins.inspect.record import (
    FOLDER,
    NAME,
    GroupRecord,
    StepRecord,
    describe,
    files_of,
    path_of,
    step_of,
)
from grpo_lightning.training import disk
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.loop import GRPOLoop, evaluating
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.observer import Observer
from grpo_lightning.training.step import Step
from grpo_lightning.types import at_least

SECONDS = "time/inspect"


class Inspector(Callback, Observer):
    """Records what the updates of a step did to each token of some completions: files under `inspect/` in the run.

    Each token has its log-probs when drawn, under the old policy, in the last update, after it and under the reference.
    It also has its advantage, weight and terms of the objective, entropies, and the likeliest tokens before and after.
    The groups are the most mixed, the most moved, the worst and the best; beside them some validation prompts are
    followed over the run. Every n-th step is recorded and the last of `trainer.max_epochs`, with metrics under
    `update/`. Nothing else of the run changes.

    Args:
        every_n_steps: Exploration steps between two records. 0 records nothing.
        num_groups: Groups recorded of a step, over all ranks.
        num_followed: Validation prompts that are answered at every recorded step, and before the first step.
        num_samples: Answers drawn for each of them besides the greedy one.
    """

    def __init__(
        self, every_n_steps: int = 10, num_groups: int = 4, num_followed: int = 2, num_samples: int = 3
    ) -> None:
        at_least("inspect.every_n_steps", every_n_steps, 0)
        at_least("inspect.num_groups", num_groups, 0)
        at_least("inspect.num_followed", num_followed, 0)
        at_least("inspect.num_samples", num_samples, 0)
        self.every_n_steps = every_n_steps
        self.num_groups = num_groups
        self.num_followed = num_followed
        self.num_samples = num_samples
        self._trainer: L.Trainer
        self._module: GRPOModule
        self._observers: list[Observer] = []
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forgets what an earlier or interrupted run has left, and leaves its loop."""
        if self in self._observers:
            self._observers.remove(self)
        self._observers = []
        """Those of the loop that it follows."""
        self._seconds = 0.0
        self._candidates: Candidates | None = None
        self._groups: list[GroupRecord] | None = None
        self._metrics: dict[str, float] = {}
        self._begins = True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Follows the loop of the run, unless it is switched off or the run is a trial."""
        assert isinstance(pl_module, GRPOModule)
        self._begin_anew()
        pl_module.evaluation.kept = {}
        if stage != "fit" or not self.every_n_steps or disk.is_trial(trainer):
            return
        self._trainer, self._module = trainer, pl_module
        self._observers = GRPOLoop.find(trainer).observers
        self._observers.append(self)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leaves the loop."""
        assert isinstance(pl_module, GRPOModule)
        self._begin_anew()
        pl_module.evaluation.kept = {}

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets the validation before the first step answer the followed prompts."""
        if self._observers:
            self._followed.expect()

    def prepared(self, step: Step) -> None:
        """Measures the groups that may be recorded."""
        trainer = self._trainer
        begins, self._begins = self._begins, False
        if begins and trainer.is_global_zero:
            # The first step writes the record of step 0 too.
            _forget(Path(trainer.default_root_dir), trainer.current_epoch or -1)
        if begins and trainer.current_epoch == 0:
            with self._looking():
                groups = self._followed.records(self._measure)
            if groups:
                self._write(0, groups)
        if self._is_due:
            with self._looking():
                self._candidates = Candidates(step, self._module, self.num_groups, self._measure)
                self._followed.expect()

    def updated(self, step: Step) -> None:
        """Measures again."""
        if self._candidates is None:
            return
        with self._looking():
            self._metrics = Movement.from_step(step, self._module.policy, self._module.objective).metrics()
            loop = GRPOLoop.find(self._trainer)
            self._groups = self._candidates.records(loop.num_minibatches)
        self._candidates = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the record of the step, and logs its metrics with those of the step."""
        if self._groups is None:
            return
        # Validation comes before this, and may have answered the followed prompts.
        with self._looking():
            groups = self._groups + self._followed.records(self._measure)
        self._write(trainer.current_epoch + 1, groups)
        metrics = self._metrics | {SECONDS: max(ranks.gather(self._seconds))}
        self._groups, self._metrics, self._seconds = None, {}, 0.0
        # Lightning would put plain numbers on the GPU, to fetch them from there.
        pl_module.log_dict({name: torch.tensor(value) for name, value in metrics.items()})

    @property
    def _is_due(self) -> bool:
        """Whether the step under way is recorded."""
        step = self._trainer.current_epoch + 1
        return step == self._trainer.max_epochs or step % self.every_n_steps == 0

    @property
    def _measure(self) -> Measure:
        loop = GRPOLoop.find(self._trainer)
        return Measure(self._module.policy, loop.max_tokens, self._module.device)

    @property
    def _followed(self) -> Followed:
        data = getattr(self._trainer, "datamodule", None)
        assert isinstance(data, PromptDataModule)
        return Followed(self._module, data, self.num_followed, self.num_samples)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Eval mode without gradients, on the clock; random states and counts of failed rewards stay."""
        started = perf_counter()
        parts = [part for reward in self._module.evaluation.scorer.rewards for part in reward.with_parts()]
        tallies = [part.tally.copy() for part in parts]
        with isolate_rng(), evaluating(self._trainer, self._module):
            yield
        for part, tally in zip(parts, tallies, strict=True):
            part.tally = tally
        self._seconds += perf_counter() - started

    def _write(self, step: int, groups: list[GroupRecord]) -> None:
        """Writes a step's file, on rank 0."""
        if not self._trainer.is_global_zero:
            return
        started, module = perf_counter(), self._module
        scorer = module.explorer.scorer
        record = StepRecord(
            step=step,
            objective=describe(module.objective),
            temperature=module.sampling.temperature,
            val_temperature=self._followed.temperature,
            rewards=[reward.name for reward in scorer.rewards],
            correct=scorer.correct,
            groups=groups,
        )
        text = "".join(line + "\n" for line in record.lines())
        disk.write_whole(path_of(self._trainer.default_root_dir, step), text)
        self._seconds += perf_counter() - started


def _forget(run: Path, steps: int) -> None:
    """Removes half-written files, and the records of steps after `steps`, which will be repeated; -1 keeps none."""
    for file in files_of(run):
        if step_of(file) > steps:
            file.unlink()
    for file in (run / FOLDER).glob("step-*.partial"):
        if NAME.fullmatch(file.stem):
            file.unlink()
