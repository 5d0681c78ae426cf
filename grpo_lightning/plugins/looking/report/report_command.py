"""`grpo report`: runs compared on one page of HTML that needs no network, no script and no other file.

    grpo report runs/quickstart                           one run
    grpo report runs/plain/0 runs/plain/1 runs/dapo/0     runs; those that differ in the seed alone are one arm
    grpo report runs/does_kl_matter -o kl.html            a folder of arms, which hold a folder per seed
    grpo report runs/does_kl_matter --table tex           the tables of the page for a paper: md, tex or csv
    grpo report runs/does_kl_matter -o figures            the page, and each curve as SVG and PDF with its data

The page shows the curves and the differences to the base, the first arm, with intervals over the seeds, what the
configurations differ in, and links to the pages of `grpo inspect` that lie in the runs' folders.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.plugins.looking.pages.markup import check_out, counted, write_page
from grpo_lightning.plugins.looking.report.arm_comparison import AXES, SUMMED, Metric
from grpo_lightning.plugins.looking.report.arms import Arm, arms_of, read_runs
from grpo_lightning.plugins.looking.report.report import Report
from grpo_lightning.plugins.looking.report.report_figures import check_folder, write_figures
from grpo_lightning.plugins.looking.report.report_formats import ESCAPES, formatted
from grpo_lightning.types import UsageError, require

PAGE = "report.html"
TABLE_FILE = "numbers"
"""The name of the tables' file in the folder of the figures, before the format's."""
DEFAULTS = ("reward/mean", "rollout/length_mean", "policy/entropy", "policy/kl_ref", "time/step")


def metrics_of(texts: Sequence[str], logged: Sequence[str]) -> list[Metric]:
    """Returns the metrics of a command line, or the default ones; a name alone means last value and mean."""
    validated = [name for name in logged if re.fullmatch(r"val/(greedy|([\w-]+/)?avg@\d+)", name)]
    default = [*validated, *(name for name in DEFAULTS if name in logged)]
    require(bool(texts or default), f"none of the default metrics is there, but {', '.join(logged)}. Give --metrics")
    metrics: list[Metric] = []
    for text in texts or default:
        metric = Metric.parse(text)
        if metric.name not in logged:
            fit = ", ".join((difflib.get_close_matches(metric.name, logged, 5, cutoff=0.4) or logged)[:5])
            raise UsageError(f"--metrics {text}: no run has logged {metric.name}. Give a logged one, such as {fit}")
        metrics += [metric, Metric(metric.name, "mean")] if text == metric.name else [metric]
    return list(dict.fromkeys(metrics))


def with_base(arms: Sequence[Arm], base: str | None) -> list[Arm]:
    """Returns the arms with the base first, the others in their order; without a name the first arm is the base."""
    arm_names = [arm.name for arm in arms]
    if base is None:
        return [*arms]
    require(base in arm_names, f"--base {base}: there is no such configuration. Give one of {', '.join(arm_names)}")
    return sorted(arms, key=lambda arm: arm.name != base)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a command line."""
    parser = argparse.ArgumentParser(
        "grpo report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    folder = "a run's folder, or one that holds runs; the first is the base"
    add("runs", nargs="+", type=Path, metavar="RUN", help=folder)
    out_help = f"the page ({PAGE} by default), or a folder for it and its figures: each as SVG, PDF and CSV"
    add("-o", "--out", type=Path, help=out_help)
    table = f"prints the tables in this format instead of writing a page; with a folder they are {TABLE_FILE}.* there"
    add("--table", choices=ESCAPES, help=table)
    add("--base", metavar="ARM", help="the configuration that the others are compared with, by its name on the page")
    metrics = "scalars: name (last value and mean), name:last, name:last3, name:mean, name>=number, name<=number"
    add("--metrics", nargs="+", default=[], help=metrics)
    add("--x", nargs="+", choices=AXES, default=["step"], help="a set of curves and a table for each")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page, the tables and the figures, and prints where they are; returns the exit code."""
    options = options_of(arguments)
    out: Path = options.out or Path(PAGE)
    has_figures = out.is_dir() or not out.suffix
    if has_figures:
        check_folder(out)
    else:
        check_out(out, PAGE)

    arms = with_base(arms_of(read_runs(options.runs)), options.base)
    runs = [run for arm in arms for run in arm.runs.values()]
    for axis in options.x:
        if without := [run.folder for run in runs if axis in SUMMED and SUMMED[axis] not in run.scalars]:
            raise UsageError(f"--x {axis}: {without[0]} has not logged {SUMMED[axis]}. Give --x step")
    logged = {name for run in runs for name in run.scalars} - {"epoch", "hp_metric"}
    title = Path(os.path.commonpath([run.resolve() for run in options.runs])).name or "Report"
    page_path = out / PAGE if has_figures else out
    report = Report(title, arms, metrics_of(options.metrics, sorted(logged)), options.x, page_path.parent.resolve())

    # A table is all that stands on standard output, so that it can go into a file.
    tables = formatted(report.tables(), options.table) if options.table else ""
    is_printed = bool(tables) and not has_figures
    messages = [f"note: {note}" for note in report.notes()]
    if has_figures:
        num_figures = write_figures(out, report)
        messages.append(f"{out}: {counted(num_figures, 'figure')} as SVG, PDF and CSV")
        if tables:
            write_page(out / f"{TABLE_FILE}.{options.table}", tables)
    if is_printed:
        print(tables, end="")
    if options.out or not tables:
        write_page(page_path, report.html())
        counts = f"{counted(len(arms), 'configuration')}, {counted(len(runs), 'run')}"
        messages.append(f"{page_path}: {counts}. Open it in a browser.")
    print(*messages, sep="\n", file=sys.stderr if is_printed else sys.stdout)
    return 0
