"""What one exploration step looked like, over all ranks: the numbers under reward/, rollout/ and time/."""

import math
import resource
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from grpo_lightning import ranks
from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.training.explorer import Exploration


@dataclass
class StepStatistics:
    """Sums, counts and maxima, so that those of ranks can be put together."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Numbers of samples, to be divided by that of all samples: a rank may have none of a kind another has."""

    @classmethod
    def from_exploration(cls, exploration: Exploration, group_size: int, seconds: dict[str, float]) -> "StepStatistics":
        """This rank's share of the step.

        Args:
            exploration: What was found.
            group_size: G.
            seconds: Time spent by phase; `step` is the whole step.
        """
        step = cls()
        samples, scores = exploration.samples, exploration.scores
        step.add_reward("reward", scores.total, group_size)
        for name, result in scores.results.items():
            step.add_reward(f"reward/{name}", result.value, group_size)
            for status, count in Counter(result.status).items():
                step.shares[f"reward/{name}/{status}"] = count
        for group in groups(scores.total, group_size):
            step.add("reward/zero_spread", max(group, default=0) == min(group, default=0))
        for sample in samples:
            step.add("rollout/length_mean", len(sample.token_ids))
            step.add("rollout/truncated", sample.truncated)
        for sample, value in zip(samples, scores.main.value, strict=True):
            if not math.isnan(value):
                step.add(f"rollout/length_{'right' if value > RIGHT_ABOVE else 'wrong'}", len(sample.token_ids))
        sampled = sum(len(sample.token_ids) for sample in samples)
        step.add("rollout/wasted", sampled - exploration.rollouts.num_tokens, sampled)
        step.maxima["rollout/length_max"] = max(len(sample.token_ids) for sample in samples)
        step.maxima |= {f"time/{phase}": value for phase, value in seconds.items()}
        return step

    def add(self, name: str, value: float, count: float = 1) -> None:
        """Adds `value` to a mean in which it stands for `count` cases."""
        self.sums[name] += value
        self.counts[name] += count

    def add_reward(self, name: str, values: Sequence[float], group_size: int) -> None:
        """Mean over the completions, and the standard deviation inside a group averaged over the groups."""
        for group in groups(values, group_size):
            if group:
                self.add(f"{name}/mean", sum(group), len(group))
                self.add(f"{name}/std", statistics.pstdev(group))

    def gather(self) -> "StepStatistics":
        """Those of all ranks together."""
        total = StepStatistics()
        for rank in ranks.gather(self):
            for name, value in rank.sums.items():
                total.add(name, value, rank.counts[name])
            for name, number in rank.shares.items():
                total.shares[name] += number
            for name, value in rank.maxima.items():
                total.maxima[name] = max(value, total.maxima.get(name, value))
        return total

    def metrics(self) -> dict[str, float]:
        """The step's metrics by name."""
        metrics = {name: value / self.counts[name] for name, value in self.sums.items()} | self.maxima
        metrics |= {name: number / self.counts["rollout/length_mean"] for name, number in self.shares.items()}
        metrics["rollout/tokens"] = self.sums["rollout/length_mean"]
        metrics["time/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/step"]
        return metrics


def groups(values: Sequence[float], group_size: int) -> list[list[float]]:
    """The numbers of each group, failed samples left out."""
    return [
        [value for value in values[first : first + group_size] if not math.isnan(value)]
        for first in range(0, len(values), group_size)
    ]


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use at once since the start, in GiB: of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # macOS counts bytes, Linux KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
