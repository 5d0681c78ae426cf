"""`grpo sweep`: makes the runs of an experiment, several at a time, and compares them.

    grpo sweep rates.yaml                       the runs of a file, into runs/rates/ARM/SEED
    grpo sweep experiments/does_kl_matter       those of experiment.yaml in a folder
    grpo sweep rates.yaml --dry-run             the command lines of the runs that are missing

The file:

    config: [grpo_lightning:quickstart]   # --config files of every run
    args:                                 # options of every run; a list or a dict stands for itself
      trainer.max_epochs: 30
      trainer.check_val_every_n_epoch: 3
    seeds: [0, 1, 2, 3, 4]
    arms:                                 # the first is what the others are compared with
      no KL: {}
      beta 0.04: {model.objective.beta: 0.04}
      dapo: {config: grpo_lightning:algorithms/dapo, loop.mu: 2}   # one or more files after those of every run
    grid:                                 # every arm, or the only one, with each combination of values
      model.optimizer.lr: [1.0e-4, 3.0e-4]
      loop.group_size: [4, 8]
    metrics: [val/avg@8, "val/avg@8:mean", "val/avg@8>=0.9"]       # as --metrics of grpo report
    x: [step, seconds]                    # as its --x; step if left out

Of two options with the same name the arm's counts; of an option and a file the option. A class comes before its own
options (`model.objective.kl: K2`, then `model.objective.kl.<option>`). Paths are relative to the working directory.

A run is `grpo fit` with these options, its seed and its own folder, with what it prints in log.txt; without progress
bar, checkpoints or sampled completions. The options of every arm are checked before the first run. Each run has one
thread; the times of arms compare as long as all run with the same number of --workers. A run that is complete
(done.json says so) and had the same options is kept, unless --again; one that was interrupted, failed or had other
options is removed and made anew. A changed configuration file is not noticed. Runs end with the sweep.

At the end the report of `grpo report` stands in report.html beside the arms, and its tables are printed.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lightning.plugins.console.sweep.experiment import ArmRun, Experiment
from grpo_lightning.plugins.console.sweep.sweep_runs import Children, Interrupted, locked, make_runs, refused
from grpo_lightning.plugins.looking.report import report_command
from grpo_lightning.types import UsageError, require


@dataclass(frozen=True)
class Sweep:
    """The runs of an experiment, and how they are made."""

    experiment: Experiment
    """What the runs are."""
    out: Path
    """The folder of the runs."""
    workers: int
    """Runs at a time."""
    again: bool = False
    """True if complete runs are made anew."""

    def runs(self) -> list[ArmRun]:
        """Returns all runs."""
        return self.experiment.runs(self.out)

    def complete_runs(self) -> list[ArmRun]:
        """Returns the runs that are complete, arm by arm."""
        runs = [run for run in self.runs() if run.is_complete()]
        return sorted(runs, key=lambda run: [*self.experiment.arms].index(run.arm))

    def missing_runs(self) -> list[ArmRun]:
        """Returns the runs to make. Raises UsageError if one's folder holds something else."""
        runs = [run for run in self.runs() if self.again or not run.is_complete()]
        for run in runs:
            if run.folder.exists() and not run.log.exists():
                raise UsageError(f"{run.folder}: this is no run of a sweep, since it has no log.txt. Move it away")
        return runs

    def make(self, prepare: Callable[[Sequence[ArmRun]], None] = lambda runs: None) -> dict[str, str]:
        """Makes the missing runs, and returns by name why runs failed.

        Args:
            prepare: Called with the missing runs before their options are checked.
        """
        with locked(self.out):
            runs = self.missing_runs()
            print(f"{len(self.runs())} runs, {len(runs)} to make", flush=True)
            prepare(runs)
            children = Children(self.workers)
            if reasons := refused(runs, children, self.out):
                raise UsageError("; ".join(f"{arm}: {reason}" for arm, reason in reasons.items()))
            return make_runs(runs, children)


def report(sweep: Sweep) -> None:
    """Writes the report of the complete runs, and prints its tables."""
    folders = [str(run.folder) for run in sweep.complete_runs()]
    metrics = ["--metrics", *sweep.experiment.metrics] if sweep.experiment.metrics else []
    options = [*folders, *metrics, "--x", *sweep.experiment.axes]
    report_command.main([*options, "--out", str(sweep.out / report_command.PAGE), "--table", "md"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the runs that are missing, and compares all; returns the exit code."""
    parser = argparse.ArgumentParser(
        "grpo sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("experiment", type=Path, help="the experiment's file, or a folder with experiment.yaml")
    add("--out", type=Path, help="the folder of the runs; runs/NAME by default, after the experiment's file or folder")
    add("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, a thread each")
    add("--again", action="store_true", help="makes also the runs that are complete")
    add("--dry-run", action="store_true", help="prints the command lines of the runs that are missing")
    options = parser.parse_args(arguments)
    require(options.workers >= 1, f"--workers {options.workers}: give 1 or more")
    experiment = Experiment.read(options.experiment)
    sweep = Sweep(experiment, options.out or Path("runs") / experiment.name, options.workers, options.again)
    if options.dry_run:
        print("\n".join(shlex.join(["grpo", *run.args]) for run in sweep.missing_runs()))
        return 0
    try:
        failures = sweep.make()
    except Interrupted:
        print("grpo sweep: interrupted; complete runs are kept", file=sys.stderr)
        return 130
    if sweep.complete_runs():
        report(sweep)
    if failures:
        raise UsageError(f"{len(failures)} of {len(sweep.runs())} runs failed: {'; '.join(failures)}")
    return 0
