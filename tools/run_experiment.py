"""Runs the arms of an experiment of this repository, and writes its table and its picture.

python tools/run_experiment.py experiments/does_kl_matter [--workers 2] [--again] [--write] [--dry-run]

It is `grpo sweep` for experiments/<name>/experiment.yaml, from the repository's root: `grpo sweep --help` explains the
file. The runs are in runs/experiments/<name>. Policies and data that an experiment names are made if they are not
there.

At the end: runs/experiments/<name>/results.md and results.png. `--write` copies them: the tables between
`<!-- results -->` and `<!-- /results -->` in experiments/<name>/README.md, the picture beside it.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.plugins.console.sweep.experiment import ArmRun, Experiment
from grpo_lightning.plugins.console.sweep.sweep_command import Sweep
from grpo_lightning.plugins.console.sweep.sweep_runs import Interrupted
from grpo_lightning.types import UsageError

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {
    "runs/smollm2": "tools/get_smollm2.py",
    "runs/guessing_policy": "tools/make_tiny_policy.py --mistakes answer --wrong 0.7",
    "runs/weak_policy": "tools/make_tiny_policy.py --mistakes answer --wrong 0.7 --updates 400",
    "runs/guessing_reward_model": "tools/make_reward_model.py --policy runs/guessing_policy",
    "runs/slipping_policy": "tools/make_tiny_policy.py --digits 3 --mistakes columns --wrong 0.4 --updates 1000",
    "runs/plus_minus_policy": "tools/make_tiny_policy.py --mistakes answer --wrong 0.7 --operators +- --updates 1200",
    "runs/longer_sums": "experiments/warm_start/make_data.py",
    "runs/mixed_sums": "experiments/warm_start/make_data.py --short",
    "runs/warm_policy": "experiments/warm_start/make_policy.py",
    "runs/plus_reward_model": "tools/make_reward_model.py --policy runs/plus_minus_policy",
}
"""How to make what experiments start from and ask, in this order; `--out` is added."""
OPEN, CLOSE = "<!-- results -->", "<!-- /results -->"


def folder_of(experiment: Experiment) -> Path:
    """The folder of an experiment's runs, from the repository's root."""
    return Path("runs") / "experiments" / experiment.name


def make_models(runs: Sequence[ArmRun]) -> None:
    """Makes policies and reward models if a run's options or files name them and they are not there."""
    arguments = {argument for run in runs for argument in run.args}
    files = {ROOT / argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")}
    texts = [*arguments, *(file.read_text() for file in files if file.exists())]
    for folder, command in RECIPES.items():
        if not (ROOT / folder).exists() and any(folder in text for text in texts):
            print(f"making {folder}", flush=True)
            subprocess.run([sys.executable, *command.split(), "--out", folder], cwd=ROOT, check=True)


def compare(sweep: Sweep, out: Path) -> str:
    """Writes out.md and out.png of the complete runs; returns the tables."""
    from compare_runs import write

    from grpo_lightning.plugins.looking.report.arm_comparison import Metric

    folders: dict[str, list[Path]] = {}
    for run in sweep.complete_runs():
        folders.setdefault(run.arm, []).append(run.folder)
    return write(folders, [Metric.parse(metric) for metric in sweep.experiment.metrics], sweep.experiment.axes, out)


def inserted(readme: str, tables: str) -> str:
    """The README with the tables between the marks.

    Raises:
        UsageError: The marks are not there, once each and in order.
    """
    if readme.count(OPEN) != 1 or readme.count(CLOSE) != 1 or readme.index(OPEN) > readme.index(CLOSE):
        raise UsageError(f"README.md of the experiment: it needs the lines {OPEN} and {CLOSE}, once each")
    before, after = readme.split(OPEN)[0], readme.split(CLOSE)[1]
    return f"{before}{OPEN}\n{tables.strip()}\n{CLOSE}{after}"


def check(experiment: Experiment, folder: Path, write: bool) -> None:
    """Raises UsageError if there is no metric to compare by, or the README cannot take the tables."""
    if not experiment.metrics:
        raise UsageError(f"{folder / 'experiment.yaml'}: give one metric or more")
    if write:
        readme = folder / "README.md"
        inserted(readme.read_text(encoding="utf-8") if readme.exists() else "", "")


def execute(folder: Path, workers: int, again: bool, write: bool, dry_run: bool) -> None:
    """Runs what is missing, compares, and reports what failed."""
    experiment = Experiment.read(folder)
    check(experiment, folder, write)
    sweep = Sweep(experiment, folder_of(experiment), workers, again)
    if dry_run:
        print("\n".join(shlex.join(["grpo", *run.args]) for run in sweep.missing_runs()))
        return
    failures = sweep.make(make_models)
    out = sweep.out / "results"
    if sweep.complete_runs():
        print(f"\n{compare(sweep, out)}\n{out}.md, {out}.png")
    if failures:
        raise UsageError(f"{len(failures)} of {len(sweep.runs())} runs failed: {'; '.join(failures)}")
    if write:
        readme = folder / "README.md"
        tables = out.with_suffix(".md").read_text(encoding="utf-8")
        readme.write_text(inserted(readme.read_text(encoding="utf-8"), tables), encoding="utf-8")
        shutil.copyfile(out.with_suffix(".png"), folder / "results.png")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Runs the arms of an experiment and compares them.")
    parser.add_argument("folder", type=Path, help="folder with experiment.yaml")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, a thread each")
    parser.add_argument("--again", action="store_true", help="run also what is complete")
    parser.add_argument("--write", action="store_true", help="put the results into the experiment's folder")
    parser.add_argument("--dry-run", action="store_true", help="print the command lines of the runs that are missing")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: give 1 or more")
    options.folder = options.folder.resolve()
    try:
        with contextlib.chdir(ROOT):
            execute(**vars(options))
    except ValueError as error:
        sys.exit(f"run_experiment: {error}")
    except Interrupted:
        sys.exit("run_experiment: interrupted; what is complete is kept")


if __name__ == "__main__":
    main()
