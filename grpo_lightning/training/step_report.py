"""The report of a step over all ranks: what it took, and what came of it; reward/, rollout/, time/ and perf/."""

import logging
import math
import resource
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
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


class StepReport(Callback):
    """Logs every step. Each `GRPOModule` brings one along."""

    def __init__(self) -> None:
        self.remarks: Counter[str] = Counter()  # why steps of this start learned nothing, and how many
        self._began = 0.0  # the updates of the step under way
        self._validations: list[float] = []  # seconds of its validations so far, which are no part of it
        self._between = 0.0
        """Seconds of validation before its last update so far: `trainer.val_check_interval` puts it between updates."""
        self._ended: float | None = None  # when the last step had ended; None before the first of this start
        self._has_warned = False
        """Whether it was said what is taken for right where no grader says 0 or 1."""
        self._rates: set[str] = set()
        """The fractions that are logged as 0 where nothing happens: once they have been above it."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets what an earlier fit has logged."""
        if stage == "fit":
            self._rates, self._ended, self._has_warned = set(), None, False
            self.remarks.clear()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock of the updates, and tells the observers the step's mean reward."""
        loop = GRPOLoop.find(trainer)
        scored = [value for value in loop.current_step.exploration.scores.total if not math.isnan(value)]
        totals, counts = zip(*ranks.gather((sum(scored), len(scored))), strict=True)
        for observer in loop.observers if sum(counts) else ():
            observer.rewarded(sum(totals) / sum(counts))
        self._began, self._validations, self._between = perf_counter(), [], 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        """Notes the end of an update: validation comes between the last one and `on_train_epoch_end`."""
        self._between = sum(self._validations)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock of a step's validation."""
        self._validations.append(-perf_counter())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops it."""
        self._validations[-1] += perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Logs the step."""
        loop = GRPOLoop.find(trainer)
        step, exploration = loop.current_step, loop.current_step.exploration
        self._warn_of_bound(exploration)
        begun, self._ended = self._ended or step.started, perf_counter()
        optimise = step.updated - self._began - self._between
        seconds = {"optimise": optimise, "step": optimise + step.prepared - step.started, "wall": self._ended - begun}
        seconds |= exploration.seconds | ({"validate": sum(self._validations)} if self._validations else {})
        own = StepStatistics.from_exploration(exploration, loop.group_size, seconds, learned_tokens(step))
        everyone = own.gather()
        # Whoever reads the last value of one must not find that of an earlier step.
        absent = [name for name in self._rates if name.split("/")[1] in exploration.scores.results]
        metrics = dict.fromkeys(absent, 0.0) | everyone.metrics() | step.metrics
        remarks = everyone.remarks(step.passes, not pl_module.objective.learns_from_advantage_alone)
        self.remarks.update(remarks)
        made, rule = sum(is_made for is_made, _ in step.updates), step.passes.ended_by
        some = [f"{made} of {loop.updates_per_step} updates{f', {rule}' if rule else ''}"]
        step.remarks = (some if made < loop.updates_per_step else []) + remarks
        if loop.updates_per_step > 1:
            metrics["optim/updates"] = made
        if not isinstance(loop.stop, FixedPasses):
            metrics[f"optim/stopped_by/{type(loop.stop).__name__}"] = float(rule is not None)
        if bad_updates := int(pl_module.bad_updates):  # no curve that is 0 throughout
            metrics["optim/bad_updates"] = bad_updates
        if loop.dynamic_sampling is None and not metrics.get("rollout/wasted") and "rollout/wasted" not in self._rates:
            metrics.pop("rollout/wasted", None)
        self._rates |= {name for name in (*everyone.sample_counts, "rollout/wasted") if name in metrics}
        metrics |= exploration.metrics
        metrics["time/peak_memory_gib"] = peak_memory_gib(pl_module.device)
        # Lightning would put plain numbers on the GPU, to fetch them from there.
        logged = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        logged = {"reward/mean": torch.tensor(math.nan)} | logged | of_updates(step)
        # Lightning would write them after the step's checkpoint: a run killed between the two would lack the point.
        internals.write(trainer, logged, step=trainer.current_epoch)
        pl_module.log("reward/mean", logged.pop("reward/mean"), prog_bar=True, logger=False)
        pl_module.log_dict(logged, logger=False)
        for observer in loop.observers:
            observer.reported(metrics)
        # Callbacks after this one may look at the exploration; the micro-batches are what takes memory.
        step.micro_batches.clear()

    def _warn_of_bound(self, exploration: Exploration) -> None:
        """Says once what is taken for right if the grader has other values than 0 and 1."""
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
        """The fractions that have been logged."""
        return {"rates": sorted(self._rates)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them. A fit that does not resume forgets them in `setup`."""
        self._rates = set(state_dict["rates"])


def of_updates(step: Step) -> dict[str, torch.Tensor]:
    """Means and maxima over the updates that were made; of a metric that none of these has, over the others."""
    summary = {}
    for name in dict.fromkeys(name for _, metrics in step.updates for name in metrics):
        made = [metrics[name] for is_made, metrics in step.updates if is_made and name in metrics]
        values = torch.stack(made or [metrics[name] for _, metrics in step.updates if name in metrics])
        summary[name] = values.max() if name in MAXIMA else values.mean()
    return summary


@dataclass
class StepStatistics:
    """Sums, counts and maxima, so that those of several ranks can be combined."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, of the slowest rank; `step` is the whole step, `wall` all that has passed since the last one."""
    learned: int = 0  # drawn tokens that the updates learned from, once per pass
    sample_counts: Counter[str] = field(default_factory=Counter)
    """Counts of samples, to be divided by that of all samples: a rank may lack a kind that another has."""

    @classmethod
    def from_exploration(
        cls, exploration: Exploration, group_size: int, seconds: dict[str, float], learned: int
    ) -> "StepStatistics":
        """The statistics of this rank, of groups of `group_size` completions; the rest as in the fields."""
        step = cls(seconds=seconds, learned=learned)
        samples, scores = exploration.samples, exploration.scores
        step.add_reward("reward", scores.total, group_size)
        for name, result in scores.results.items():
            step.add_reward(f"reward/{name}", result.value, group_size)
            step.sample_counts.update(f"reward/{name}/{status}" for status in result.status)
        total = torch.tensor(scores.total, dtype=torch.float64)
        group = torch.arange(len(total)) // group_size
        for spread in has_spread(total, group, -(-len(total) // group_size)).tolist():
            step.add("reward/frac_zero_std", not spread)
        for row, sample in enumerate(samples):
            length, is_right = len(sample.token_ids), scores.is_right(row)
            step.add("rollout/length_mean", length)
            step.add("rollout/truncated", sample.truncated)
            if is_right is not None:
                step.add(f"rollout/length_{'right' if is_right else 'wrong'}", length)
                step.add("rollout/right_and_finished", is_right and not sample.truncated)
            if (talk := sample.conversation) is not None:
                step.add("rollout/turns", len(talk.ends))
                step.add("rollout/branches", max(0, len(talk.pieces) - 1))
                step.add("rollout/context", talk.num_given)
                step.add("rollout/calls", talk.num_calls)
                step.add("rollout/failed_calls", talk.num_failed_calls)
                step.add("rollout/environment_failed", talk.status != Status.OK)
        sampled = step.sums["rollout/length_mean"]
        step.add("rollout/wasted", sampled - exploration.rollouts.num_tokens, sampled)
        step.maxima["rollout/length_max"] = max((len(sample.token_ids) for sample in samples), default=0)
        return step

    def add(self, name: str, value: float, count: float = 1) -> None:
        """Adds `value`, the sum over `count` cases, to a mean."""
        self.sums[name] += value
        self.counts[name] += count

    def add_reward(self, name: str, values: Sequence[float], group_size: int) -> None:
        """Adds the mean over completions, and the standard deviation within a group averaged over groups."""
        for first in range(0, len(values), group_size):
            group = [value for value in values[first : first + group_size] if not math.isnan(value)]
            if group:
                self.add(f"{name}/mean", sum(group), len(group))
                self.add(f"{name}/std", statistics.pstdev(group))

    def gather(self) -> "StepStatistics":
        """The statistics of all ranks together. Every rank must call it."""
        total = StepStatistics()
        for rank in ranks.gather(self):
            for name, value in rank.sums.items():
                total.add(name, value, rank.counts[name])
            total.sample_counts.update(rank.sample_counts)
            for largest, values in ((total.maxima, rank.maxima), (total.seconds, rank.seconds)):
                largest.update({name: max(value, largest.get(name, value)) for name, value in values.items()})
            total.learned += rank.learned
        return total

    def metrics(self) -> dict[str, float]:
        """The step's metrics by name."""
        # Where every environment has failed before a token was drawn, there is nothing to have wasted.
        metrics = {name: value / self.counts[name] for name, value in self.sums.items() if self.counts[name]}
        metrics |= self.maxima
        metrics |= {name: count / self.counts["rollout/length_mean"] for name, count in self.sample_counts.items()}
        metrics["rollout/tokens"] = self.sums["rollout/length_mean"]
        return metrics | self.times() | self.speeds(metrics["rollout/tokens"])

    def remarks(self, passes: Passes, moves_anyway: bool) -> list[str]:
        """Why the step learned nothing, or little; `moves_anyway` if tokens without advantage have a gradient too."""
        groups, total = self.counts["reward/frac_zero_std"], self.counts["rollout/truncated"]
        cut_off = total and self.sums["rollout/truncated"] == total
        found = [f"{total:.0f} of {total:.0f} completions cut off"] if cut_off else []
        if not any(update.has_advantage > 0 for update in passes.updates):
            why = "" if moves_anyway else "no token had an advantage"
            if not self.counts["reward/mean"]:
                why = "no completion has a reward"
            elif self.sums["reward/frac_zero_std"] == groups:
                why = f"all {groups:.0f} groups had equal rewards"
            acted = "only KL or entropy terms acted" if moves_anyway else "nothing was learned"
            found += [f"{why}: {acted}"] if why else []
        return found

    def times(self) -> dict[str, float]:
        """Seconds of each phase, and fractions of the wall clock; what no phase took is `other`."""
        metrics = {f"time/{name}": value for name, value in self.seconds.items() if name not in ("validate", "wall")}
        wall = self.seconds["wall"]
        fractions = {name: value / wall for name, value in self.seconds.items() if name not in ("step", "wall")}
        fractions["other"] = max(0.0, 1 - sum(fractions.values()))
        return metrics | {f"time/fraction_{name}": fraction for name, fraction in fractions.items()}

    def speeds(self, tokens: float) -> dict[str, float]:
        """Tokens per second, of which `tokens` were sampled in the step."""
        counts = {"": ("step", tokens), "_explore": ("explore", tokens), "_optimise": ("optimise", self.learned)}
        return {
            f"perf/tokens_per_second{name}": count / self.seconds[phase]
            for name, (phase, count) in counts.items()
            if self.seconds.get(phase)  # a source may have sampled before
        }


def learned_tokens(step: Step) -> int:
    """Drawn tokens that the updates of a step learned from on this rank, once per pass."""
    updates = range(len(step.passes.updates))
    return sum(
        micro_batch.rollouts.num_tokens
        for i in updates
        for micro_batch in step.micro_batches[i % len(step.micro_batches)]
    )


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use at once since the start, in GiB: on the GPU, or by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # macOS counts bytes, Linux KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
