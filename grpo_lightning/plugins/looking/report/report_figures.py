"""The curves of a report as files for a paper: SVG and PDF by matplotlib, and their data as CSV."""

import csv
import io
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.disk import beside
from grpo_lightning.plugins.looking.pages.markup import ASSETS, write_page
from grpo_lightning.plugins.looking.report.charts import (
    MOST_DOTS,
    CurveFigure,
    Series,
    padded,
    ticks,
    value_ticks,
    y_range,
)
from grpo_lightning.plugins.looking.report.report import NUM_COLORS, Report
from grpo_lightning.types import UsageError, require

INCHES = (3.3, 2.2)
"""The width and height of a figure: a column of a paper with two."""

STYLE: dict[str, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 8,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # conferences refuse fonts of type 3
    "svg.fonttype": "none",
    "svg.hashsalt": "grpo report",
    "text.parse_math": False,
}
"""Settings of matplotlib. The same runs give the same files."""

METADATA: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Ends of files, and what they should not say."""

DASHES = ("-", "--", ":")
"""Styles of lines: arms beyond the colours repeat them with dashes."""


def check_folder(folder: Path) -> None:
    """Refuses a folder that no figures can be written to, before the runs are read."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"--out {folder}: figures need matplotlib. Install it with pip install 'grpo-lightning[figures]', or give "
            f"the name of a page, such as {folder}.html"
        )
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    is_open = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    require(is_open, f"--out {folder}: nothing can be written to {existing}. Give another folder")


def write_figures(folder: Path, report: Report) -> int:
    """Writes each figure of a report as SVG and PDF, and what it shows as CSV; returns the number of figures."""
    figures = [(axis, figure) for axis in report.axes for figure in report.figures(axis) if not figure.is_empty]
    stems: set[str] = set()
    for axis, figure in figures:
        stem = re.sub(r"\W+", "_", figure.name) + f"_over_{axis}"
        while stem in stems:
            stem += "_"
        stems.add(stem)
        write_page(folder / f"{stem}.csv", data_of(figure))
        draw(figure, folder / stem)
    return len(figures)


def data_of(figure: CurveFigure) -> str:
    """Returns what a figure shows as CSV: a row per point of the mean with its interval, and per point of a seed."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("arm", "seed", "x", "y", "low", "high"))
    for arm in figure.series:
        writer.writerows(_rows_of(arm))
    return out.getvalue()


def _rows_of(arm: Series) -> Iterator[tuple[Any, ...]]:
    ends_by_x = {x: ends for piece in arm.band for x, *ends in piece}
    yield from ((arm.name, "mean", x, y, *ends_by_x.get(x, ("", ""))) for piece in arm.mean for x, y in piece)
    for seed, pieces in arm.seeds.items():
        yield from ((arm.name, seed, x, y, "", "") for piece in pieces for x, y in piece)


def draw(figure: CurveFigure, path: Path) -> None:
    """Draws a figure into files named as `path`, with .svg and .pdf behind, in the colours of the page."""
    # This import takes a second, which only figures need.
    import matplotlib
    from matplotlib.figure import Figure

    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    colors = re.findall(r"--c\d: (#\w+)", style)[:NUM_COLORS]
    with matplotlib.rc_context(STYLE):
        canvas = Figure(INCHES, layout="constrained")
        axes = canvas.add_subplot(xlabel=figure.axis.label, ylabel=figure.name)
        for arm in figure.series:
            draw_arm(axes, arm, colors[arm.number % NUM_COLORS])
        for threshold in figure.lines:
            axes.axhline(threshold, color="gray", linestyle=(0, (2, 3)), linewidth=0.8)
        ends = padded([figure.axis.low, figure.axis.high], 0.02)
        axes.set_xlim(*ends)
        axes.set_xticks(ticks(*ends, 6, figure.axis.is_count))
        axes.set_ylim(*y_range(figure.series, figure.lines))
        axes.set_yticks(value_ticks(figure.series, figure.lines))
        if len(figure.series) > 1:
            axes.legend()
        for ending, metadata in METADATA.items():
            with beside(path.with_name(path.name + ending)) as partial:
                canvas.savefig(partial, format=ending.removeprefix("."), metadata=metadata)


def draw_arm(axes: Any, arm: Series, color: str) -> None:
    """Draws the band, the seeds and the mean of an arm, as the page does."""
    dashes = DASHES[min(arm.number // NUM_COLORS, len(DASHES) - 1)]
    for piece in arm.band:
        axes.fill_between(*zip(*piece, strict=True), color=color, alpha=0.13, linewidth=0)
    for piece in (piece for seed in arm.seeds.values() for piece in seed if len(arm.seeds) > 1):
        axes.plot(*zip(*piece, strict=True), color=color, alpha=0.45, linewidth=0.6)
    marker = "o" if sum(map(len, arm.mean)) <= MOST_DOTS else ""
    for index, piece in enumerate(arm.mean):
        label = "_" if index else arm.name
        axes.plot(
            *zip(*piece, strict=True), dashes, color=color, marker=marker, markersize=2, linewidth=1.2, label=label
        )
