"""`grpo report`: runs compared on one page of HTML that needs no network, no script and no other file.

    grpo report runs/quickstart                           one run
    grpo report runs/plain/0 runs/plain/1 runs/dapo/0     runs; those that differ in the seed alone are one arm
    grpo report runs/does_kl_matter -o kl.html            a folder of arms, which hold a folder per seed

The page shows the curves and the differences to the first arm, with intervals over the seeds, what the
configurations differ in, and links to the pages of `grpo inspect` that lie in the runs' folders.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_lightning.plugins.inspect.arms import Arm, arms_of, read_runs
from grpo_lightning.plugins.inspect.comparison import AXES, SUMMED, Metric
from grpo_lightning.plugins.inspect.markup import counted
from grpo_lightning.plugins.inspect.output import check_out, write_whole
from grpo_lightning.plugins.inspect.report_page import Report
from grpo_lightning.plugins.inspect.scalars import validation_names
from grpo_lightning.types import UsageError

PAGE = "report.html"
"""The page's name, unless another is given."""
DEFAULTS = ("reward/mean", "rollout/length_mean", "policy/entropy", "policy/kl_ref", "time/step")
"""Behind the validation: what is shown unless metrics are given, where a run has logged it."""
MOST_CLOSE = 5
"""How many logged names are told where one is not found."""
CLOCKS = {"epoch", "hp_metric"}
"""Logged by every run, and no metric."""


def default_metrics(arms: Sequence[Arm]) -> list[str]:
    """The metrics to show of these arms.

    Raises:
        UsageError: The arms have no metric in common, or none that is shown by default.
    """
    logged = [{name for run in arm.runs.values() for name in run.scalars} - CLOCKS for arm in arms]
    if not set.intersection(*logged):
        told = "; ".join(f"{arm.name} has {_listed(names)}" for arm, names in zip(arms, logged, strict=True))
        raise UsageError(f"the runs have no metric in common: {told}. Give runs of the same program")
    found: list[str] = []
    for arm in arms:
        for run in arm.runs.values():
            found += validation_names(run.scalars)[:2]
    every = set.union(*logged)
    found = [name for name in dict.fromkeys([*sorted(set(found)), *DEFAULTS]) if name in every]
    if not found:
        raise UsageError(f"none of the metrics shown by default is there. Give --metrics from: {_listed(every)}")
    return found


def parse_metrics(texts: Iterable[str], arms: Sequence[Arm]) -> list[Metric]:
    """The metrics of a command line; a name alone stands for the last value and the mean.

    Raises:
        UsageError: One is no metric, or no run has logged it.
    """
    every = {name for arm in arms for run in arm.runs.values() for name in run.scalars}
    metrics: list[Metric] = []
    for text in texts:
        try:
            metric = Metric.parse(text)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if metric.name not in every:
            close = difflib.get_close_matches(metric.name, sorted(every - CLOCKS), MOST_CLOSE, cutoff=0.4)
            shared = [name for name in sorted(every - CLOCKS) if metric.name in name]
            fit = list(dict.fromkeys([*shared, *close]))[:MOST_CLOSE] or default_metrics(arms)
            raise UsageError(
                f"--metrics {text}: no run has logged {metric.name}. Give a logged one, such as {', '.join(fit)}"
            )
        metrics += [metric, Metric(metric.name, "mean")] if text == metric.name else [metric]
    return list(dict.fromkeys(metrics))


def check_axis(axis: str, arms: Sequence[Arm]) -> None:
    """Finds what an axis needs.

    Raises:
        UsageError: A run has not logged it.
    """
    for run in (run for arm in arms for run in arm.runs.values()):
        if axis in SUMMED and SUMMED[axis] not in run.scalars:
            raise UsageError(f"--x {axis}: {run.folder} has not logged {SUMMED[axis]}. Give --x step")


def with_base(arms: list[Arm], base: str | None) -> list[Arm]:
    """The arms, the one to compare with first.

    Raises:
        UsageError: There is no such arm.
    """
    if base is None:
        return arms
    if base not in (known := [arm.name for arm in arms]):
        raise UsageError(f"--base {base}: there is no such arm; there are: {'; '.join(known)}")
    return sorted(arms, key=lambda arm: arm.name != base)


def write(page: str, out: Path) -> None:
    """Writes the page whole or not at all.

    Raises:
        UsageError: The disk refuses.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page)
    except OSError as error:
        raise UsageError(f"--out {out}: it cannot be written ({error.strerror}). Give another with -o") from error


def report(options: argparse.Namespace) -> str:
    """Makes the page; returns what to print.

    Raises:
        UsageError: The folders, files or options do not fit.
    """
    check_out(options.out, PAGE)
    arms = with_base(arms_of(read_runs(options.runs)), options.base)
    for axis in options.x:
        check_axis(axis, arms)
    metrics = parse_metrics(options.metrics or default_metrics(arms), arms)
    title = Path(os.path.commonpath([run.resolve() for run in options.runs])).name or "Report"
    page = Report(title, arms, metrics, options.x, options.out.parent.resolve())
    write(page.html(), options.out)
    num_runs = sum(len(arm.runs) for arm in arms)
    counts = f"{counted(len(arms), 'configuration')}, {counted(num_runs, 'run')}"
    return "\n".join([*(f"note: {note}" for note in page.notes()), f"{options.out}: {counts}. Open it in a browser."])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "grpo report",
        description=f"{head.partition(': ')[2].capitalize()}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one that holds runs")
    parser.add_argument("-o", "--out", type=Path, default=Path(PAGE), help=f"the page; {PAGE} by default")
    parser.add_argument(
        "--metrics",
        nargs="+",
        help="scalars: name (last value and mean), name:last, name:mean, name>=number, name<=number",
    )
    parser.add_argument("--x", nargs="+", choices=AXES, default=["step"], help="a set of curves and a table for each")
    parser.add_argument("--base", help="the arm that the others are compared with; the first by default")
    try:
        print(_printable(report(parser.parse_args(arguments))))
    except UsageError as error:
        print(_printable(f"grpo: error: {error}"), file=sys.stderr)
        return 2
    return 0


def _printable(text: str) -> str:
    """The text without what a name in the file system may hold and a terminal cannot show."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
