"""`grpo report`: runs compared on one page of HTML that needs no network, no script and no other file.

    grpo report runs/quickstart                           one run
    grpo report runs/plain/0 runs/plain/1 runs/dapo/0     runs; those that differ in the seed alone are one arm
    grpo report runs/does_kl_matter -o kl.html            a folder of arms, which hold a folder per seed

The page shows the curves and the differences to the first arm given, with intervals over the seeds, what the
configurations differ in, and links to the pages of `grpo inspect` that lie in the runs' folders.
"""

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.plugins.inspect.arms import arms_of, read_runs
from grpo_lightning.plugins.inspect.comparison import AXES, SUMMED, Metric
from grpo_lightning.plugins.inspect.markup import check_out, counted, write_page
from grpo_lightning.plugins.inspect.report_page import Report
from grpo_lightning.types import UsageError, require

PAGE = "report.html"
DEFAULTS = ("reward/mean", "rollout/length_mean", "policy/entropy", "policy/kl_ref", "time/step")


def metrics_of(texts: Sequence[str], logged: Sequence[str]) -> list[Metric]:
    """The metrics of a command line, or those shown by default; a name alone stands for the last value and the mean."""
    validated = [name for name in logged if re.fullmatch(r"val/(greedy|([\w-]+/)?avg@\d+)", name)]
    default = [*validated, *(name for name in DEFAULTS if name in logged)]
    require(bool(texts or default), f"none of the default metrics is there, but {', '.join(logged)}. Give --metrics")
    found: list[Metric] = []
    for text in texts or default:
        metric = Metric.parse(text)
        if metric.name not in logged:
            fit = ", ".join((difflib.get_close_matches(metric.name, logged, 5, cutoff=0.4) or logged)[:5])
            raise UsageError(f"--metrics {text}: no run has logged {metric.name}. Give a logged one, such as {fit}")
        found += [metric, Metric(metric.name, "mean")] if text == metric.name else [metric]
    return list(dict.fromkeys(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the page and prints where it is; returns the exit code."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "grpo report",
        description=f"{head.partition(': ')[2].capitalize()}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    folder = "a run's folder, or one that holds runs; the first is the base"
    add("runs", nargs="+", type=Path, metavar="RUN", help=folder)
    add("-o", "--out", type=Path, default=Path(PAGE), help=f"the page; {PAGE} by default")
    metrics = "scalars: name (last value and mean), name:last, name:mean, name>=number, name<=number"
    add("--metrics", nargs="+", default=[], help=metrics)
    add("--x", nargs="+", choices=AXES, default=["step"], help="a set of curves and a table for each")
    options = parser.parse_args(arguments)
    check_out(options.out, PAGE)
    arms = arms_of(read_runs(options.runs))
    runs = [run for arm in arms for run in arm.runs.values()]
    for axis in options.x:
        if without := [run.folder for run in runs if axis in SUMMED and SUMMED[axis] not in run.scalars]:
            raise UsageError(f"--x {axis}: {without[0]} has not logged {SUMMED[axis]}. Give --x step")
    logged = {name for run in runs for name in run.scalars} - {"epoch", "hp_metric"}
    title = Path(os.path.commonpath([run.resolve() for run in options.runs])).name or "Report"
    page = Report(title, arms, metrics_of(options.metrics, sorted(logged)), options.x, options.out.parent.resolve())
    write_page(options.out, page.html())
    counts = f"{counted(len(arms), 'configuration')}, {counted(len(runs), 'run')}"
    print(*(f"note: {note}" for note in page.notes()), f"{options.out}: {counts}. Open it in a browser.", sep="\n")
    return 0
