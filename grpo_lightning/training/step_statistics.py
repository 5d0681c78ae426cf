"""Statistics of one exploration step over all ranks: the metrics under reward/, rollout/, time/ and perf/."""

import math
import resource
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from grpo_lightning import ranks
from grpo_lightning.maths.advantages import has_spread
from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.maths.stopping import Passes
from grpo_lightning.training.explorer import Exploration
from grpo_lightning.training.throughput import Work
from grpo_lightning.types import Conversation, Status


@dataclass
class StepStatistics:
    """Sums, counts and maxima, so that those of several ranks can be combined."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, of the slowest rank; `step` is the whole step, `wall` all that has passed since the last one."""
    work: Work = field(default_factory=Work)
    """The updates, summed over ranks."""
    sample_counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Counts of samples, to be divided by that of all samples: a rank may lack a kind that another has."""

    @classmethod
    def from_exploration(
        cls, exploration: Exploration, group_size: int, seconds: dict[str, float], work: Work
    ) -> "StepStatistics":
        """The statistics of this rank.

        Args:
            exploration: The completions and their scores.
            group_size: G.
            seconds: Seconds per phase; `step` is the whole step, `wall` all that has passed since the last one.
            work: The updates.
        """
        step = cls(seconds=dict(seconds), work=work)
        samples, scores = exploration.samples, exploration.scores
        step.add_reward("reward", scores.total, group_size)
        for name, result in scores.results.items():
            step.add_reward(f"reward/{name}", result.value, group_size)
            for status, count in Counter(result.status).items():
                step.sample_counts[f"reward/{name}/{status}"] = count
        total = torch.tensor(scores.total, dtype=torch.float64)
        group = torch.arange(len(total)) // group_size
        for spread in has_spread(total, group, -(-len(total) // group_size)).tolist():
            step.add("reward/zero_spread", not spread)
        for sample in samples:
            step.add("rollout/length_mean", len(sample.token_ids))
            step.add("rollout/truncated", sample.truncated)
            if sample.conversation is not None:
                step.add_conversation(sample.conversation)
        for sample, value in zip(samples, scores.main.value, strict=True):
            if not math.isnan(value):
                right = value > RIGHT_ABOVE
                step.add(f"rollout/length_{'right' if right else 'wrong'}", len(sample.token_ids))
                step.add("rollout/right_and_finished", right and not sample.truncated)
        sampled = sum(len(sample.token_ids) for sample in samples)
        step.add("rollout/wasted", sampled - exploration.rollouts.num_tokens, sampled)
        step.maxima["rollout/length_max"] = max((len(sample.token_ids) for sample in samples), default=0)
        return step

    def add(self, name: str, value: float, count: float = 1) -> None:
        """Adds `value`, the sum over `count` cases, to a mean."""
        self.sums[name] += value
        self.counts[name] += count

    def add_reward(self, name: str, values: Sequence[float], group_size: int) -> None:
        """Adds the mean over completions, and the standard deviation within a group averaged over groups."""
        for group in groups(values, group_size):
            if group:
                self.add(f"{name}/mean", sum(group), len(group))
                self.add(f"{name}/std", statistics.pstdev(group))

    def add_conversation(self, talk: Conversation) -> None:
        """Adds what a conversation with an environment consists of."""
        self.add("rollout/turns", len(talk.ends))
        self.add("rollout/given", talk.num_given)
        self.add("rollout/calls", talk.num_calls)
        self.add("rollout/failed_calls", talk.num_failed_calls)
        self.add("rollout/branches", max(0, len(talk.pieces) - 1))
        self.add("rollout/environment_failed", talk.status != Status.OK)

    def gather(self) -> "StepStatistics":
        """The statistics of all ranks together. Every rank must call it."""
        total = StepStatistics()
        for rank in ranks.gather(self):
            for name, value in rank.sums.items():
                total.add(name, value, rank.counts[name])
            for name, count in rank.sample_counts.items():
                total.sample_counts[name] += count
            for largest, values in ((total.maxima, rank.maxima), (total.seconds, rank.seconds)):
                for name, value in values.items():
                    largest[name] = max(value, largest.get(name, value))
            total.work += rank.work
        return total

    def metrics(self) -> dict[str, float]:
        """The step's metrics by name."""
        # Where every environment has failed before a token was drawn, there is nothing to have wasted.
        means = {name: value / self.counts[name] for name, value in self.sums.items() if self.counts[name]}
        metrics = means | self.maxima
        metrics |= {name: count / self.counts["rollout/length_mean"] for name, count in self.sample_counts.items()}
        metrics["rollout/tokens"] = self.sums["rollout/length_mean"]
        return metrics | self.times() | self.speeds(metrics["rollout/tokens"])

    def remarks(self, passes: Passes, moves_anyway: bool) -> list[str]:
        """Why the step learned nothing, or next to nothing; empty for a step as it should be.

        Args:
            passes: The updates, with numbers of all ranks.
            moves_anyway: Whether tokens without an advantage have a gradient too.
        """
        found, groups, total = [], self.counts["reward/zero_spread"], self.counts["rollout/truncated"]
        if total and self.sums["rollout/truncated"] == total:
            found.append(f"{total:.0f} of {total:.0f} completions cut off")
        if not any(update.pushing > 0 for update in passes.updates):
            why = "no token had an advantage"
            if not self.counts["reward/mean"]:
                why = "no completion has a reward"
            elif self.sums["reward/zero_spread"] == groups:
                why = f"all {groups:.0f} groups had equal rewards"
            found.append(f"{why}: {'only KL or entropy terms acted' if moves_anyway else 'nothing was learned'}")
        return found

    def times(self) -> dict[str, float]:
        """Seconds of each phase, and fractions of the wall clock; what no phase took is `other`."""
        metrics = {f"time/{name}": value for name, value in self.seconds.items() if name not in ("validate", "wall")}
        wall = self.seconds["wall"]
        fractions = {name: value / wall for name, value in self.seconds.items() if name not in ("step", "wall")}
        fractions["other"] = max(0.0, 1 - sum(fractions.values()))
        return metrics | {f"time/fraction_{name}": fraction for name, fraction in fractions.items()}

    def speeds(self, tokens: float) -> dict[str, float]:
        """Tokens per second, and how much of the device's arithmetic the updates used where its peak is known.

        Args:
            tokens: Those sampled in the step.
        """
        counts = {"": ("step", tokens), "_explore": ("explore", tokens), "_optimise": ("optimise", self.work.tokens)}
        metrics = {
            f"perf/tokens_per_second{name}": count / self.seconds[phase]
            for name, (phase, count) in counts.items()
            if self.seconds.get(phase)  # a source may have sampled before
        }
        if self.work.operations and self.work.peak:
            metrics["perf/mfu"] = self.work.operations / (self.seconds["optimise"] * self.work.peak)
        return metrics


def groups(values: Sequence[float], group_size: int) -> list[list[float]]:
    """The values of each group, without failed samples."""
    return [
        [value for value in values[first : first + group_size] if not math.isnan(value)]
        for first in range(0, len(values), group_size)
    ]


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use at once since the start, in GiB: on the GPU, or by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # macOS counts bytes, Linux KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
