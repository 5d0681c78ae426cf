"""The callback that records, token by token, what a step's updates did."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from grpo_lightning import disk, ranks
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.grpo.step import Observer, Step
from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.maths.objective import Objective
from grpo_lightning.plugins.looking.inspector.candidates import Candidates
from grpo_lightning.plugins.looking.inspector.following import Followed
from grpo_lightning.plugins.looking.inspector.groups import Measure
from grpo_lightning.plugins.looking.inspector.record import (
    FOLDER,
    GroupRecord,
    StepRecord,
    describe,
    files_of,
    path_of,
    step_of,
)
from grpo_lightning.plugins.looking.run_files.provenance import newest_start
from grpo_lightning.policy.policy import Policy
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import at_least


class Inspector(Callback, Observer):
    """Records what the updates of a step did to each token of some completions: files under `inspect/` in the run.

    Each token has its log-probs when sampled, under the old policy, in the last update, after the step and under the
    reference. It also has its advantage, weight and terms of the objective, entropies, and the likeliest tokens before
    and after. The groups are the most mixed, the most moved, the worst and the best; beside them some validation
    prompts are followed over the run. Every n-th step is recorded and the last of `trainer.max_epochs`, with metrics
    under `update/`. Nothing else of the run changes.

    Args:
        every_n_steps: Exploration steps between two records. 0 records nothing.
        num_groups: Groups recorded of a step, over all ranks.
        num_followed: Validation prompts that are answered at every recorded step, and before the first step.
        num_samples: Answers sampled for each of these prompts besides the greedy answer.
    """

    def __init__(
        self, every_n_steps: int = 10, num_groups: int = 4, num_followed: int = 2, num_samples: int = 3
    ) -> None:
        self.every_n_steps = every_n_steps
        self.num_groups = num_groups
        self.num_followed = num_followed
        self.num_samples = num_samples
        for name, value in vars(self).items():
            at_least(f"inspect.{name}", value, 0)
        self._is_on = False
        self._trainer: L.Trainer
        self._module: GRPOModule

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Resets the callback, which records nothing if it is switched off or the run is a trial."""
        self._trainer = trainer
        self._module = pl_module
        self._seconds = 0.0
        self._is_first_step = True
        self._candidates: Candidates | None = None
        self._groups: list[GroupRecord] | None = None
        self._metrics: dict[str, float] = {}
        pl_module.evaluation.answers_by_id = {}
        self._is_on = stage == "fit" and self.every_n_steps > 0 and not disk.is_trial(trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Makes the validation before the first step keep its answers to the followed prompts."""
        if self._is_on:
            self._followed.expect()

    def prepared(self, step: Step) -> None:
        """Measures the groups that may be recorded."""
        if not self._is_on:
            return
        trainer = self._trainer
        is_first_step = self._is_first_step
        self._is_first_step = False
        if is_first_step and trainer.is_global_zero:
            # The run repeats the steps after the one it resumes from; a fresh run writes step 0 again too.
            run = Path(trainer.default_root_dir)
            last_step = trainer.current_epoch or -1
            repeated = (file for file in files_of(run) if step_of(file) > last_step)
            for file in (*repeated, *(run / FOLDER).glob(f"step-*.jsonl{disk.PARTIAL}")):
                file.unlink()
        if is_first_step and trainer.current_epoch == 0:
            with self._looking():
                groups = self._followed.records(self._measure)
            if groups:
                self._write(0, groups)
        number = trainer.current_epoch + 1
        if number == trainer.max_epochs or number % self.every_n_steps == 0:
            with self._looking():
                self._candidates = Candidates(step, self._module, self.num_groups, self._measure)
                self._followed.expect()

    def updated(self, step: Step) -> None:
        """Measures the same groups again, after the updates."""
        if self._candidates is not None:
            with self._looking():
                self._metrics = movement(step, self._module.policy, self._module.objective)
                self._groups = self._candidates.records(GRPOLoop.find(self._trainer).num_minibatches)
            self._candidates = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the record of the step, and logs its metrics with those of the step."""
        if self._groups is None:
            return
        # Validation comes before this, and may have answered the followed prompts.
        with self._looking():
            groups = self._groups + self._followed.records(self._measure)
        self._write(trainer.current_epoch + 1, groups)
        metrics = self._metrics | {"time/inspect": max(ranks.gather(self._seconds))}
        self._groups = None
        self._seconds = 0.0
        pl_module.log_dict({name: torch.tensor(value) for name, value in metrics.items()})

    @property
    def _measure(self) -> Measure:
        return Measure(self._module.policy, GRPOLoop.find(self._trainer).max_tokens)

    @property
    def _followed(self) -> Followed:
        data: TaskData = self._trainer.datamodule  # type: ignore[attr-defined]
        return Followed(self._module, data, self.num_followed, self.num_samples)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Evaluates without gradients and counts the time; random states and counts of failed rewards stay."""
        started = perf_counter()
        self._module.explorer.settle()
        rewards = [nested for reward in self._module.evaluation.scorer.rewards for nested in reward.with_parts()]
        tallies = [deepcopy(reward.tally) for reward in rewards]
        with isolate_rng(), self._module.evaluating():
            yield
        for reward, tally in zip(rewards, tallies, strict=True):
            reward.tally = tally
        self._seconds += perf_counter() - started

    def _write(self, step: int, groups: list[GroupRecord]) -> None:
        """Writes a step's file, on rank 0."""
        if not self._trainer.is_global_zero:
            return
        started = perf_counter()
        module = self._module
        scorer = module.explorer.scorer
        record = StepRecord(
            step=step,
            objective=describe(module.objective) | {"entropy_bonus": module.objective.entropy.coefficient},
            temperature=module.sampling.temperature,
            val_temperature=self._followed.temperature,
            rewards=[reward.name for reward in scorer.rewards],
            correct=scorer.grader.name,
            groups=groups,
            provenance=newest_start(self._trainer.default_root_dir),
        )
        path = path_of(self._trainer.default_root_dir, step)
        disk.write_whole(path, "".join(line + "\n" for line in record.lines()))
        self._seconds += perf_counter() - started


METRICS = ("update/agreement", "update/delta_logp_right", "update/delta_logp_wrong")


def movement(step: Step, policy: Policy, objective: Objective) -> dict[str, float]:
    """Returns the metrics over all ranks, without those that are not defined, after a forward per micro-batch.

    They are over the tokens that an update was made with: an update that a stop rule refused, or that was skipped as
    not finite, does not count. Every rank must call it, in eval mode and without gradients.
    """
    # For each metric a sum and its divisor.
    totals = torch.zeros(3, 2, dtype=torch.float64)
    value = step.exploration.scores.main.value
    for micro_batch in (micro_batch for micro_batches in step.micro_batches for micro_batch in micro_batches):
        rollouts = micro_batch.rollouts
        layout = micro_batch.layout or policy.compute.layout(rollouts)
        logp = policy(rollouts, layout=layout).logp
        layout.free()
        if not micro_batch.updated or micro_batch.is_idle:
            continue
        assert rollouts.old_logp is not None
        change = logp - rollouts.old_logp
        weight = rollouts.weight * objective.factor(rollouts.old_logp, rollouts)
        push = weight * rollouts.advantage
        totals[0] += torch.stack([push.abs()[change * push > 0].sum(), push.abs().sum()]).cpu()
        # NaN, where the grader failed, is neither right nor wrong.
        grade = rollouts.per_token(
            torch.tensor([value[row] for row in rollouts.sample_index.tolist()], device=logp.device)
        )
        for total, has_grade in zip(totals[1:], (grade > RIGHT_ABOVE, grade <= RIGHT_ABOVE), strict=True):
            counts = (weight != 0) & has_grade
            total += torch.stack([change[counts].sum(), counts.sum()]).cpu()
    totals_by_rank = ranks.gather(totals)
    sums = sum(totals_by_rank[1:], totals_by_rank[0]).tolist()
    return {name: total / count for name, (total, count) in zip(METRICS, sums, strict=True) if count}
