"""The regimes of the comparison: what they ask for, and one table and one plot over all that was measured."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memory_limit import GIB
from race import Race
from result_tables import NONE, OURS, SIDES, TRL, Outcome, table
from stopwatches import PHASES

SMALL: dict[str, dict[str, Any]] = {
    "short": {"prompt_tokens": 16, "new_tokens": 64, "prompts": 32},
    "long-prompt": {"prompt_tokens": 512, "new_tokens": 64, "prompts": 16},
    "long-answer": {"prompt_tokens": 64, "new_tokens": 512, "prompts": 16, "lognormal": True},
}
REAL: dict[str, dict[str, Any]] = {
    "short": {"prompt_tokens": 63, "new_tokens": 32, "prompts": 4},
    "long-prompt": {"prompt_tokens": 490, "new_tokens": 32, "prompts": 2, "trl_rows": 8},
    "long-answer": {"prompt_tokens": 63, "new_tokens": 256, "prompts": 2, "lognormal": True},
}
"""Sizes by regime, of the small model and of a real one. TRL's rows are as many as fit into the memory."""
PRECISIONS = ("fp32", "bf16")
COLORS = ("#0072B2", "#CC79A7", "#999999", "#D55E00", "#009E73", "#DDDDDD")
"""Of the phases and of what is in none."""

Record = dict[str, Any]
"""What both sides did in a regime: `model`, `regime`, `precision`, `sizes`, and per side seconds, phases and memory."""


def record_of(model: str, race: Race, sides: Mapping[str, Outcome], note: str) -> Record:
    """What was measured of one race.

    Args:
        model: Its size, as in the table.
        race: The sizes.
        sides: By name.
        note: Versions and machine.
    """
    found = {
        side: {
            "seconds": outcome.seconds,
            "peak": outcome.peak,
            "exceeded": outcome.exceeded,
            "phases": outcome.details.get("phases", {}),
        }
        for side, outcome in sides.items()
    }
    sizes = f"{race.prompts} x {race.group_size}, {replace(race, precision='fp32').name}"
    return {
        "model": model,
        "regime": race.regime,
        "precision": race.precision,
        "sizes": sizes,
        "sides": found,
        "note": note,
    }


def merged(before: Sequence[Record], after: Sequence[Record]) -> list[Record]:
    """All records, the later of two with the same model, regime and precision, in the table's order."""
    keep = {key_of(record): record for record in [*before, *after]}
    regimes, models = list(SMALL), {record["model"]: None for record in keep.values()}

    def rank(record: Record) -> tuple[int, int, int]:
        order = (list(models), regimes, list(PRECISIONS))
        return tuple(among.index(name) for among, name in zip(order, key_of(record), strict=True))  # type: ignore

    return sorted(keep.values(), key=rank)


def key_of(record: Record) -> tuple[str, str, str]:
    """What a record is of."""
    return record["model"], record["regime"], record["precision"]


def read(path: Path) -> list[Record]:
    """The records of a file that may not be there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def median(side: Mapping[str, Any]) -> float | None:
    """Seconds per step; None if the side did not run to its end."""
    return statistics.median(side["seconds"]) if side["seconds"] and not side["exceeded"] else None


def regime_table(records: Sequence[Record]) -> str:
    """Two rows per race: seconds per step and of each phase, memory, and the ratio."""
    heads = ["model", "regime", "precision", "prompts x completions, tokens", "", "s per step", "ratio"]
    heads += [*PHASES, "other", "GiB"]
    rows = []
    for record in records:
        sides = record["sides"]
        medians = {name: median(sides[name]) for name in SIDES}
        ratio = NONE if None in medians.values() else f"**{medians[TRL] / medians[OURS]:.2f}**"
        first = [record["model"], record["regime"], record["precision"], record["sizes"]]
        for name, label in SIDES.items():
            side, seconds = sides[name], medians[name]
            cells = [NONE] * (len(PHASES) + 1) if seconds is None else phase_cells(side, seconds)
            more = "more than " if side["exceeded"] else ""
            memory = f"{more}{side['peak'] / GIB:.1f}" if side["peak"] else NONE
            time = NONE if seconds is None else f"{seconds:.2f}"
            rows.append([*first, label, time, ratio if name == OURS else "", *cells, memory])
            first = [""] * 4
    return table(heads, rows)


def phase_cells(side: Mapping[str, Any], seconds: float) -> list[str]:
    """Seconds of each phase, and what is in none."""
    values = [side["phases"].get(phase, 0.0) for phase in PHASES]
    return [f"{value:.2f}" for value in (*values, max(0.0, seconds - sum(values)))]


def plot(records: Sequence[Record], out: Path) -> None:
    """Two bars per race, ours above TRL's, divided into phases; per race, the longer bar is 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.62 * len(records)), dpi=90, layout="constrained")
    panel, labels = figure.subplots(), []
    for index, record in enumerate(records):
        seconds = {name: median(record["sides"][name]) for name in SIDES}
        longest = max((value for value in seconds.values() if value), default=1.0)
        labels.append(f"{record['model']}, {record['regime']}, {record['precision']}")
        for shift, name in ((-0.2, OURS), (0.2, TRL)):
            whole = seconds[name]
            if whole is None:
                panel.text(0.01, index + shift, f"{SIDES[name]}: not measured", va="center", fontsize=7)
                continue
            left = 0.0
            cells = [float(cell) for cell in phase_cells(record["sides"][name], whole)]
            for value, color, phase in zip(cells, COLORS, (*PHASES, "other"), strict=True):
                label = phase if index == 0 and name == OURS else None
                panel.barh(index + shift, value / longest, 0.36, left, color=color, label=label)
                left += value / longest
            panel.text(left + 0.01, index + shift, f"{SIDES[name]} {whole:.2f} s", va="center", fontsize=7)
    panel.set(yticks=range(len(records)), yticklabels=labels, xlim=(0, 1.25), xlabel="of the slower side's step")
    panel.invert_yaxis()
    panel.legend(frameon=False, ncols=3, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    panel.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(out)


def between(text: str, mark: str, tables: str) -> str:
    """The text with the tables between the comments `mark` and `/mark`.

    Raises:
        ValueError: They are not there, once each and in order.
    """
    opening, closing = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    if text.count(opening) != 1 or text.count(closing) != 1 or text.index(opening) > text.index(closing):
        raise ValueError(f"README.md: it needs the lines {opening} and {closing}, once each")
    before, after = text.split(opening)[0], text.split(closing)[1]
    return f"{before}{opening}\n{tables.strip()}\n{closing}{after}"
