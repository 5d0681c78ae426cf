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
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_lightning.plugins.inspect.arms import Arm, arms_of, read_runs
from grpo_lightning.plugins.inspect.comparison import AXES, SUMMED, Metric
from grpo_lightning.plugins.inspect.markup import check_out, counted, write_page
from grpo_lightning.plugins.inspect.report_page import Report
from grpo_lightning.plugins.inspect.scalars import validation_names
from grpo_lightning.types import UsageError

PAGE = "report.html"
DEFAULTS = ("reward/mean", "rollout/length_mean", "policy/entropy", "policy/kl_ref", "time/step")


def default_metrics(arms: Sequence[Arm]) -> list[str]:
    """The metrics to show of these arms."""
    runs = [run.scalars for arm in arms for run in arm.runs.values()]
    validated = sorted({name for run in runs for name in validation_names(run) if "/maj@" not in name})
    if not (found := [name for name in [*validated, *DEFAULTS] if any(name in run for run in runs)]):
        listed = "; ".join(f"{arm.name} has {', '.join(sorted(logged_by(arm)))}" for arm in arms)
        raise UsageError(f"none of the metrics shown by default is there: {listed}. Give --metrics")
    return found


def logged_by(arm: Arm) -> set[str]:
    """The names of the metrics that a run of the arm has logged; every run logs the clocks."""
    return {name for run in arm.runs.values() for name in run.scalars} - {"epoch", "hp_metric"}


def parse_metrics(texts: Iterable[str], arms: Sequence[Arm]) -> list[Metric]:
    """The metrics of a command line; a name alone stands for the last value and the mean."""
    every = sorted(set().union(*map(logged_by, arms)))
    metrics: list[Metric] = []
    for text in texts:
        try:
            metric = Metric.parse(text)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if metric.name not in every:
            shared = [name for name in every if metric.name in name]
            fit = (shared or difflib.get_close_matches(metric.name, every, cutoff=0.4) or every)[:5]
            raise UsageError(
                f"--metrics {text}: no run has logged {metric.name}. Give a logged one, such as {', '.join(fit)}"
            )
        metrics += [metric, Metric(metric.name, "mean")] if text == metric.name else [metric]
    return list(dict.fromkeys(metrics))


def report(options: argparse.Namespace) -> str:
    """Makes the page; returns what to print."""
    check_out(options.out, PAGE)
    arms = arms_of(read_runs(options.runs))
    runs = [run for arm in arms for run in arm.runs.values()]
    for axis in options.x:
        if without := [run.folder for run in runs if axis in SUMMED and SUMMED[axis] not in run.scalars]:
            raise UsageError(f"--x {axis}: {without[0]} has not logged {SUMMED[axis]}. Give --x step")
    metrics = parse_metrics(options.metrics or default_metrics(arms), arms)
    title = Path(os.path.commonpath([run.resolve() for run in options.runs])).name or "Report"
    page = Report(title, arms, metrics, options.x, options.out.parent.resolve())
    write_page(options.out, page.html())
    counts = f"{counted(len(arms), 'configuration')}, {counted(len(runs), 'run')}"
    return "\n".join([*(f"note: {note}" for note in page.notes()), f"{options.out}: {counts}. Open it in a browser."])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "grpo report",
        description=f"{head.partition(': ')[2].capitalize()}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run's folder, or one that holds runs; the first is the base",
    )
    add("-o", "--out", type=Path, default=Path(PAGE), help=f"the page; {PAGE} by default")
    metrics = "scalars: name (last value and mean), name:last, name:mean, name>=number, name<=number"
    add("--metrics", nargs="+", help=metrics)
    add("--x", nargs="+", choices=AXES, default=["step"], help="a set of curves and a table for each")
    print(report(parser.parse_args(arguments)))
    return 0
