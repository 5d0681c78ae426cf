"""The curves of a report as files for a paper: SVG and PDF by matplotlib, and their data as CSV."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.disk import beside
from grpo_lightning.plugins.looking.pages.markup import write_page
from grpo_lightning.plugins.looking.report.charts import (
    MOST_DOTS,
    CurveFigure,
    Series,
    padded,
    ticks,
    value_ticks,
    y_range,
)
from grpo_lightning.plugins.looking.report.report import Report
from grpo_lightning.plugins.looking.report.report_formats import plain_text
from grpo_lightning.types import require

STYLE = Path(__file__).with_name("figures.mplstyle")
"""Settings of matplotlib."""


def check_folder(folder: Path) -> None:
    """Refuses a folder that no figures can be written to, before the runs are read."""
    require(
        find_spec("matplotlib") is not None,
        f"--out {folder}: figures need matplotlib. Install it with pip install 'grpo-lightning[figures]', or give the "
        f"name of a page, such as {folder}.html",
    )
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    is_open = existing.is_dir() and os.access(existing, os.W_OK)
    require(is_open, f"--out {folder}: nothing can be written to {existing}. Give another folder")


def write_figures(folder: Path, report: Report) -> int:
    """Writes each figure of a report as SVG and PDF, and what it shows as CSV; returns the number of figures."""
    figure_by_stem: dict[str, CurveFigure] = {}
    for axis in report.axes:
        for figure in (figure for figure in report.figures(axis) if not figure.is_empty):
            stem = re.sub(r"\W+", "_", figure.name) + f"_over_{axis}"
            while stem in figure_by_stem:
                stem += "_"
            figure_by_stem[stem] = figure
    for stem, figure in figure_by_stem.items():
        write_page(folder / f"{stem}.csv", plain_text("curves.csv", figure=figure))
        draw(figure, folder / stem)
    return len(figure_by_stem)


def draw(figure: CurveFigure, path: Path) -> None:
    """Draws a figure into files named as `path`, with .svg and .pdf behind."""
    # This import takes a second, which only figures need.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(fname=STYLE):
        canvas = Figure()
        axes = canvas.add_subplot(xlabel=figure.axis.label, ylabel=figure.name)
        for arm in figure.series:
            draw_arm(axes, arm)
        for threshold in figure.lines:
            axes.axhline(threshold, color="gray", linestyle=":", linewidth=0.8)
        axes.set_xlim(padded([figure.axis.low, figure.axis.high], 0.02))
        axes.set_xticks(ticks(*axes.get_xlim(), 6, figure.axis.is_count))
        axes.set_ylim(y_range(figure.series, figure.lines))
        axes.set_yticks(value_ticks(figure.series, figure.lines))
        if len(figure.series) > 1:
            axes.legend()
        # The date would make equal files differ.
        for ending, date in (("svg", "Date"), ("pdf", "CreationDate")):
            with beside(path.with_name(f"{path.name}.{ending}")) as partial:
                canvas.savefig(partial, format=ending, metadata={date: None})


def draw_arm(axes: Any, arm: Series) -> None:
    """Draws the band, the seeds and the mean of an arm, as the page does."""
    from matplotlib import rcParams

    styles = [*rcParams["axes.prop_cycle"]]
    style = styles[arm.number % len(styles)]
    for area in arm.band:
        axes.fill_between(*zip(*area, strict=True), color=style["color"], alpha=0.13, linewidth=0)
    for piece in (piece for seed in arm.seeds.values() for piece in seed if len(arm.seeds) > 1):
        axes.plot(*zip(*piece, strict=True), color=style["color"], alpha=0.45, linewidth=0.6)
    marker = "o" if sum(map(len, arm.mean)) <= MOST_DOTS else ""
    for index, piece in enumerate(arm.mean):
        axes.plot(*zip(*piece, strict=True), **style, marker=marker, label="_" if index else arm.name)
