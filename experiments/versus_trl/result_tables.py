"""The tables of the comparison, from what its processes measured."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memory_limit import GIB
from race import Race
from stopwatches import PHASES

OURS, TRL = "ours", "trl"
SIDES = {OURS: "grpo_lightning", TRL: "TRL"}
"""By the name of the side, that in the tables."""
NONE = "–"


@dataclass
class Outcome:
    """What one side did in a race, over all rounds."""

    seconds: list[float] = field(default_factory=list)
    """Of each timed step."""
    peak: int = 0
    """Most bytes resident at once; 0 if it has not run."""
    exceeded: bool = False
    """Whether it was killed for its memory."""
    details: dict[str, Any] = field(default_factory=dict)
    """What its last process wrote."""

    @property
    def median(self) -> float | None:
        """Seconds per step; None if it was not measured, or not to the end."""
        return statistics.median(self.seconds) if self.seconds and not self.exceeded else None


Results = Mapping[Race, Mapping[str, Outcome]]
"""By race and side."""


def comparison(results: Results) -> str:
    """A row per race: seconds per step of both sides, their ratio, and memory."""
    heads = ["prompt + new tokens", *(f"{name}, s per step" for name in SIDES.values()), "ratio"]
    heads += [f"{name}, GiB" for name in SIDES.values()]
    rows = []
    for race, sides in results.items():
        outcomes = [sides[side] for side in SIDES]
        medians = [outcome.median for outcome in outcomes]
        ratio = NONE if None in medians else f"{medians[1] / medians[0]:.2f}"
        rows.append([race.name, *map(time_cell, outcomes), ratio, *map(memory_cell, outcomes)])
    return table(heads, rows)


def time_cell(outcome: Outcome) -> str:
    """The median, and the fastest and the slowest step."""
    if outcome.median is None:
        return NONE
    return f"{outcome.median:.2f} ({min(outcome.seconds):.2f} to {max(outcome.seconds):.2f})"


def memory_cell(outcome: Outcome) -> str:
    """The peak, or that it was passed."""
    if not outcome.peak:
        return NONE
    return f"{'more than ' if outcome.exceeded else ''}{outcome.peak / GIB:.1f}"


def where_time_goes(results: Results) -> str:
    """A row per race: seconds of our phases, and what fraction of the rate of matrix products two of them reach."""
    heads = ["prompt + new tokens", *(f"{phase}, s" for phase in PHASES), "other, s", "matrix products, GFLOP/s"]
    heads += ["sampling reaches", "forward and backward reach"]
    rows = []
    for race, sides in results.items():
        found, median = sides[OURS].details, sides[OURS].median
        if median is None:
            rows.append([race.name, *[NONE] * (len(heads) - 1)])
            continue
        phases, rate = found["phases"], found["products_per_second"]
        reached = [
            f"{100 * found['operations'][phase] / (phases[phase] * rate):.0f} %"
            for phase in ("sampling", "forward and backward")
        ]
        other = max(0.0, statistics.median(found["seconds"]) - sum(phases.values()))
        seconds = [f"{value:.2f}" for value in (*(phases[phase] for phase in PHASES), other)]
        rows.append([race.name, *seconds, f"{rate / 1e9:.0f}", *reached])
    return table(heads, rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
