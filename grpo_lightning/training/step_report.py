"""The report of a step over all ranks: the metrics under reward/, rollout/, time/ and perf/."""

import logging
import math
import resource
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning import ranks
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.grpo.step import Step
from grpo_lightning.maths.advantages import has_spread
from grpo_lightning.maths.metrics import with_bound
from grpo_lightning.maths.stopping import FixedPasses, Passes
from grpo_lightning.training import internals
from grpo_lightning.types import Status

log = logging.getLogger(__name__)

MAXIMA = ("policy/ratio_max", "policy/logp_gap")
"""Metrics of updates whose largest value is logged for a step; of all others it is the mean."""


class StepReport(Callback):
    """Logs every step. Each `GRPOModule` adds one to the trainer."""

    def __init__(self) -> None:
        self.remarks: Counter[str] = Counter()
        """Number of steps of this start by the reason why they learned nothing."""
        self._updates_started = 0.0
        """Time at which the updates of the current step began, by `perf_counter`."""
        self._validations: list[float] = []
        """Seconds of each validation of the current step. They do not count as time of the step."""
        self._seconds_between = 0.0
        """Seconds of validation between the updates of the current step, where `trainer.val_check_interval` puts it."""
        self._last_step_ended: float | None = None
        """Time at which the last step ended, by `perf_counter`; None before the first step of this start."""
        self._has_warned = False
        """True once the run has warned that a bound on a reward decides what is right."""
        self._rates: set[str] = set()
        """Fractions that have been above 0. They are logged as 0 from then on, so that no stale value remains."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Resets what an earlier fit has logged."""
        if stage == "fit":
            self._rates = set()
            self._last_step_ended = None
            self._has_warned = False
            self.remarks.clear()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Passes the step's mean reward to the observers, and starts the clock of the updates."""
        loop = GRPOLoop.find(trainer)
        rewards = [value for value in loop.current_step.exploration.scores.total if not math.isnan(value)]
        totals, counts = zip(*ranks.gather((sum(rewards), len(rewards))), strict=True)
        for observer in loop.observers if sum(counts) else ():
            observer.rewarded(sum(totals) / sum(counts))
        self._validations = []
        self._seconds_between = 0.0
        self._updates_started = perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        """Records the seconds of the validations before this update; those after the last update are not between."""
        self._seconds_between = sum(self._validations)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock of a step's validation."""
        self._validations.append(-perf_counter())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock of a step's validation."""
        self._validations[-1] += perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Logs the step."""
        loop = GRPOLoop.find(trainer)
        step = loop.current_step
        exploration = step.exploration
        self._warn_of_bound(exploration)

        # Time: the step is exploration, preparation and updates, without validation; the wall clock has everything.
        step_ended = perf_counter()
        optimise = step.updated_at - self._updates_started - self._seconds_between
        seconds = {
            "optimise": optimise,
            "step": optimise + step.prepared_at - step.started_at,
            "wall": step_ended - (self._last_step_ended or step.started_at),
        }
        seconds |= exploration.seconds | ({"validate": sum(self._validations)} if self._validations else {})
        self._last_step_ended = step_ended

        # Statistics of all ranks. A fraction that was logged before is logged as 0, so that no stale value remains.
        total = StepStatistics.from_exploration(exploration, loop.group_size, seconds, learned_tokens(step)).gather()
        absent = [name for name in self._rates if name.split("/")[1] in exploration.scores.results]
        metrics = dict.fromkeys(absent, 0.0) | total.metrics() | step.metrics

        # Remarks: updates that were not made, and why the step learned nothing.
        remarks = total.remarks(step.passes, not pl_module.objective.learns_from_advantage_alone)
        self.remarks.update(remarks)
        num_updates = sum(is_made for is_made, _ in step.updates)
        rule = step.passes.ended_by
        if num_updates < loop.updates_per_step:
            remarks = [f"{num_updates} of {loop.updates_per_step} updates{f', {rule}' if rule else ''}", *remarks]
        step.remarks = remarks

        # Metrics that would be constant in most runs are logged only where they can vary.
        if loop.updates_per_step > 1:
            metrics["optim/updates"] = num_updates
        if not isinstance(loop.stop, FixedPasses):
            metrics[f"optim/stopped_by/{type(loop.stop).__name__}"] = float(rule is not None)
        if bad_updates := int(pl_module.bad_updates):
            metrics["optim/bad_updates"] = bad_updates
        if loop.dynamic_sampling is None and not metrics.get("rollout/wasted") and "rollout/wasted" not in self._rates:
            metrics.pop("rollout/wasted", None)
        self._rates |= {name for name in (*total.sample_counts, "rollout/wasted") if name in metrics}
        metrics |= exploration.metrics
        metrics["time/peak_memory_gib"] = peak_memory_gib(pl_module.device)

        # Tensors on the CPU: Lightning would copy plain numbers to the GPU and back.
        logged = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        logged = {"reward/mean": torch.tensor(math.nan)} | logged | of_updates(step)
        # Lightning would write them after the step's checkpoint: a run killed between the two would lack the point.
        internals.write(trainer, logged, step=trainer.current_epoch)
        pl_module.log("reward/mean", logged.pop("reward/mean"), prog_bar=True, logger=False)
        pl_module.log_dict(logged, logger=False)
        for observer in loop.observers:
            observer.reported(metrics)
        # Later callbacks may read the exploration, but not the micro-batches, which take the memory.
        step.micro_batches.clear()

    def _warn_of_bound(self, exploration: Exploration) -> None:
        """Warns once if right answers are found by a bound, since the grader has other values than 0 and 1."""
        if self._has_warned or exploration.scores.are_verdicts:
            return
        self._has_warned = True
        rank_zero_only(log.warning)(
            f"what is right in training is decided by {with_bound(str(exploration.scores.correct))}. It has other "
            "values than 0 and 1, so that statistics of training, the inspector and orders of questions may call right "
            "answers wrong. Name a grader: model.validation.grader, such as MathVerifier; one that costs money or much "
            "time must be among the rewards too, with weight 0"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the fractions that have been logged."""
        return {"rates": sorted(self._rates)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the fractions that have been logged. A fit that does not resume clears them in `setup`."""
        self._rates = set(state_dict["rates"])


def of_updates(step: Step) -> dict[str, torch.Tensor]:
    """Returns the mean or maximum of each metric over the updates that were made.

    A metric that only other updates have is averaged over these.
    """
    summary = {}
    for name in dict.fromkeys(name for _, metrics in step.updates for name in metrics):
        values_made = [metrics[name] for is_made, metrics in step.updates if is_made and name in metrics]
        values = torch.stack(values_made or [metrics[name] for _, metrics in step.updates if name in metrics])
        summary[name] = values.max() if name in MAXIMA else values.mean()
    return summary


@dataclass
class StepStatistics:
    """Sums, counts and maxima of a step, from which the metrics of several ranks can be combined."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sum of each mean's values, by metric."""
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Number of values in each sum, by metric."""
    maxima: dict[str, float] = field(default_factory=dict)
    """Largest value, by metric."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, of the slowest rank. `step` is the whole step, `wall` the time since the last step's end."""
    learned: int = 0
    """Sampled tokens that the updates learned from, once per pass."""
    sample_counts: Counter[str] = field(default_factory=Counter)
    """Number of samples with a status, by metric: a fraction of all samples. A rank may lack a status of another."""

    @classmethod
    def from_exploration(
        cls, exploration: Exploration, group_size: int, seconds: dict[str, float], learned: int
    ) -> "StepStatistics":
        """Returns the statistics of this rank's completions, in groups of `group_size`.

        `seconds` and `learned` are as in the attributes.
        """
        totals = cls(seconds=seconds, learned=learned, maxima={"rollout/length_max": 0})
        scores = exploration.scores

        # Rewards and their statuses, and groups whose rewards are all equal.
        totals.add_reward("reward", scores.total, group_size)
        for name, result in scores.results.items():
            totals.add_reward(f"reward/{name}", result.value, group_size)
            totals.sample_counts.update(f"reward/{name}/{status}" for status in result.status)
        total = torch.tensor(scores.total, dtype=torch.float64)
        group = torch.arange(len(total)) // group_size
        for spread in has_spread(total, group, -(-len(total) // group_size)).tolist():
            totals.add("reward/frac_zero_std", not spread)

        # Completions and conversations.
        for row, sample in enumerate(exploration.samples):
            length = len(sample.token_ids)
            is_right = scores.is_right(row)
            totals.add("rollout/length_mean", length)
            totals.add("rollout/truncated", sample.truncated)
            if is_right is not None:
                totals.add(f"rollout/length_{'right' if is_right else 'wrong'}", length)
                totals.add("rollout/right_and_finished", is_right and not sample.truncated)
            totals.maxima["rollout/length_max"] = max(length, totals.maxima["rollout/length_max"])
            if (conversation := sample.conversation) is not None:
                totals.add("rollout/turns", len(conversation.ends))
                totals.add("rollout/branches", max(0, len(conversation.pieces) - 1))
                totals.add("rollout/context", conversation.num_context)
                totals.add("rollout/calls", conversation.num_calls)
                totals.add("rollout/failed_calls", conversation.num_failed_calls)
                totals.add("rollout/environment_failed", conversation.status != Status.OK)

        # Tokens of completions that a filter left out.
        num_sampled = totals.sums["rollout/length_mean"]
        totals.add("rollout/wasted", num_sampled - exploration.rollouts.num_tokens, num_sampled)
        return totals

    def add(self, name: str, value: float, count: float = 1) -> None:
        """Adds `value`, the sum over `count` cases, to a mean."""
        self.sums[name] += value
        self.counts[name] += count

    def add_reward(self, name: str, values: Sequence[float], group_size: int) -> None:
        """Adds the mean over completions, and the standard deviation within a group averaged over groups."""
        for start in range(0, len(values), group_size):
            group = [value for value in values[start : start + group_size] if not math.isnan(value)]
            if group:
                self.add(f"{name}/mean", sum(group), len(group))
                self.add(f"{name}/std", statistics.pstdev(group))

    def gather(self) -> "StepStatistics":
        """Combines the statistics of all ranks. Every rank must call it."""
        total = StepStatistics()
        for rank in ranks.gather(self):
            for name, value in rank.sums.items():
                total.add(name, value, rank.counts[name])
            total.sample_counts.update(rank.sample_counts)
            for maxima, values in ((total.maxima, rank.maxima), (total.seconds, rank.seconds)):
                for name, value in values.items():
                    maxima[name] = max(value, maxima.get(name, value))
            total.learned += rank.learned
        return total

    def metrics(self) -> dict[str, float]:
        """Returns the step's metrics by name."""
        # Without sampled tokens, as where every environment has failed, there is no fraction of wasted tokens.
        metrics = {name: value / self.counts[name] for name, value in self.sums.items() if self.counts[name]}
        metrics |= self.maxima
        metrics |= {name: count / self.counts["rollout/length_mean"] for name, count in self.sample_counts.items()}
        metrics["rollout/tokens"] = self.sums["rollout/length_mean"]
        return metrics | self.times() | self.speeds(metrics["rollout/tokens"])

    def remarks(self, passes: Passes, moves_anyway: bool) -> list[str]:
        """Returns the reasons why the step learned nothing, or little.

        `moves_anyway` is true if tokens without advantage have a gradient too, as by a KL term.
        """
        remarks = []
        num_samples = self.counts["rollout/truncated"]
        if num_samples and self.sums["rollout/truncated"] == num_samples:
            remarks.append(f"{num_samples:.0f} of {num_samples:.0f} completions cut off")
        if any(update.has_advantage > 0 for update in passes.updates):
            return remarks

        # No token had an advantage: no rewards, equal rewards, or an estimator that left none.
        num_groups = self.counts["reward/frac_zero_std"]
        consequence = "only KL or entropy terms acted" if moves_anyway else "nothing was learned"
        if not self.counts["reward/mean"]:
            remarks.append(f"no completion has a reward: {consequence}")
        elif self.sums["reward/frac_zero_std"] == num_groups:
            remarks.append(f"all {num_groups:.0f} groups had equal rewards: {consequence}")
        elif not moves_anyway:
            remarks.append(f"no token had an advantage: {consequence}")
        return remarks

    def times(self) -> dict[str, float]:
        """Returns seconds of each phase, and fractions of the wall clock; `other` is the time outside the phases."""
        metrics = {f"time/{name}": value for name, value in self.seconds.items() if name not in ("validate", "wall")}
        wall = self.seconds["wall"]
        fractions = {name: value / wall for name, value in self.seconds.items() if name not in ("step", "wall")}
        fractions["other"] = max(0.0, 1 - sum(fractions.values()))
        return metrics | {f"time/fraction_{name}": fraction for name, fraction in fractions.items()}

    def speeds(self, tokens: float) -> dict[str, float]:
        """Returns tokens per second of the step and its phases; `tokens` is the number sampled in the step."""
        counts = {"": ("step", tokens), "_explore": ("explore", tokens), "_optimise": ("optimise", self.learned)}
        return {
            f"perf/tokens_per_second{name}": count / self.seconds[phase]
            for name, (phase, count) in counts.items()
            if self.seconds.get(phase)  # a source may have sampled in an earlier step
        }


def learned_tokens(step: Step) -> int:
    """Returns the number of sampled tokens that a step's updates learned from on this rank, once per pass."""
    minibatches = cycle(step.micro_batches)
    return sum(
        micro_batch.rollouts.num_tokens
        for _, minibatch in zip(step.passes.updates, minibatches, strict=False)
        for micro_batch in minibatch
    )


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory since the start, in GiB: of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # macOS counts bytes, Linux KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
