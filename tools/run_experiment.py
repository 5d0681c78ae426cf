"""Runs the arms of an experiment, several at a time, and compares them.

python tools/run_experiment.py experiments/does_kl_matter [--workers 2] [--again] [--write] [--dry-run]

The experiment is described in `experiments/<name>/experiment.yaml`:

    config: [configs/quickstart.yaml]     # --config files of every run
    args:                                 # options of every run; a list or a dict stands for itself
      trainer.max_epochs: 30
      trainer.check_val_every_n_epoch: 3
    seeds: [0, 1, 2, 3, 4]
    arms:                                 # the first is what the others are compared with
      no KL: {}
      beta 0.04: {model.objective.beta: 0.04}
      dapo: {config: configs/algorithms/dapo.yaml, loop.mu: 2}      # one or more files laid over those of every run
    grid:                                 # a sweep: every arm, or that of every run, with each combination of values
      model.optimizer.lr: [1.0e-4, 3.0e-4]
      loop.group_size: [4, 8]
    metrics: [val/avg@8, "val/avg@8:mean", "val/avg@8>=0.9"]        # the last value, the mean over the curve, and
                                          # the first x at which that is reached; <= as well
    x: [step, seconds]                    # a table and a row of panels for each; step if left out

Of two options with the same name the arm's counts; of an option and a file the option. A class comes before its own
options (`model.objective.kl: K2`, then `model.objective.kl.<option>`). Paths are relative to the repository's root.

A run is `grpo fit` with these options, its seed and its own folder, runs/experiments/<name>/<arm>/<seed>, with what it
prints in log.txt; without progress bar, checkpoints or sampled completions. `--dry-run` prints the command lines. Each
run has one thread; the times of arms compare as long as all run with the same number of `--workers`. A run that is
complete (done.json says so) and had the same options is kept, unless `--again`; one that was interrupted, failed or
had other options is removed and run anew. A changed configuration file is not noticed.

At the end: runs/experiments/<name>/results.md and results.png. `--write` copies them: the tables between
`<!-- results -->` and `<!-- /results -->` in experiments/<name>/README.md, the picture beside it.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

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
FIXED = {
    "trainer.enable_progress_bar": False,
    "trainer.enable_checkpointing": False,
    "completions.every_n_steps": 1_000_000,
    "loop.validate_first": False,  # the arms of an experiment begin alike
}
"""Default options of every run; the experiment may change them."""
OPEN, CLOSE = "<!-- results -->", "<!-- /results -->"
KEYS = {"config", "args", "seeds", "arms", "grid", "metrics", "x"}


class Mistake(ValueError):
    """Something in the experiment that its author can fix."""


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path
    arguments: list[str]
    """Of `grpo`, from `fit` on."""

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def marker(self) -> Path:
        """Written when the run is complete, with its arguments."""
        return self.folder / "done.json"

    def is_complete(self) -> bool:
        """Whether it has run to its end with these arguments."""
        return self.marker.exists() and json.loads(self.marker.read_text())["arguments"] == self.arguments


@dataclass(frozen=True)
class Experiment:
    """The contents of experiment.yaml."""

    name: str
    config: list[str]
    args: dict[str, Any]
    seeds: list[int]
    arms: dict[str, dict[str, Any]]
    metrics: list[str]
    x: list[str]

    @classmethod
    def read(cls, folder: Path) -> "Experiment":
        """Reads `folder`/experiment.yaml.

        Raises:
            Mistake: It is not there, or has not the form that this file's docstring shows.
        """
        path = folder / "experiment.yaml"
        if not path.exists():
            raise Mistake(f"{path} does not exist")
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        needed = {"seeds", "metrics"}
        if not isinstance(found, dict) or not needed <= found.keys() <= KEYS or not {"arms", "grid"} & found.keys():
            given = "give seeds, metrics, and arms or a grid"
            raise Mistake(f"{path}: {given}, and of {', '.join(sorted(KEYS))} nothing else")
        arms = {str(name): options or {} for name, options in (found.get("arms", {"": None}) or {}).items()}
        arms = crossed(arms, {key: as_values(values) for key, values in (found.get("grid") or {}).items()})
        slugs = [slug(arm) for arm in arms]
        if not arms or len(set(slugs)) < len(slugs) or "" in slugs:
            raise Mistake(f"{path}: the arms need names whose letters and digits differ; they are {', '.join(arms)}")
        if not found["seeds"] or not found["metrics"]:
            raise Mistake(f"{path}: give one seed or more, and one metric or more")
        return cls(
            folder.resolve().name,
            config=as_list(found.get("config")),
            args=found.get("args") or {},
            seeds=[int(seed) for seed in found["seeds"]],
            arms=arms,
            metrics=as_list(found["metrics"]),
            x=as_list(found.get("x", "step")),
        )

    def runs(self, folder: Path) -> list[Run]:
        """Every run, into `folder`/<arm>/<seed>; seed by seed, so that early results are of all arms."""
        return [self.run(arm, seed, folder) for seed in self.seeds for arm in self.arms]

    def run(self, arm: str, seed: int, folder: Path) -> Run:
        """One arm with one seed."""
        folder = folder / slug(arm) / str(seed)
        own = dict(self.arms[arm])
        files = [*self.config, *as_list(own.pop("config", None))]
        # What the arm sets comes last: an option of a class follows the class.
        args = {key: value for key, value in (FIXED | self.args).items() if key not in own} | own
        args |= {"seed_everything": seed, "trainer.default_root_dir": shortest(folder)}
        options = [f"--{key}={as_text(value)}" for key, value in args.items()]
        return Run(arm, seed, folder, ["fit", *(f"--config={file}" for file in files), *options])


def as_list(value: Any) -> list[str]:
    """None, one or several as a list."""
    return [] if value is None else [str(one) for one in (value if isinstance(value, list) else [value])]


def as_values(values: Any) -> list[Any]:
    """The values of an option in a grid."""
    if not isinstance(values, list) or not values:
        raise Mistake(f"grid: give a list of values for each option, not {values}")
    return values


def crossed(arms: Mapping[str, dict[str, Any]], grid: Mapping[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """Each arm with each combination of the grid's values, which its name tells: `base, lr 0.0003, group_size 8`."""
    found = {}
    for (arm, options), values in product(arms.items(), product(*grid.values())):
        own = dict(zip(grid, values, strict=True))
        named = [f"{key.rpartition('.')[2]} {as_text(value)}" for key, value in own.items()]
        found[", ".join([*([arm] if arm else []), *named])] = options | own
    return found


def as_text(value: Any) -> str:
    """A value of YAML on a command line; a list or a dict as JSON, which is YAML too."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def slug(name: str) -> str:
    """A folder's name for an arm: beta 0.04 -> beta_0.04."""
    return re.sub(r"[^a-z0-9.]+", "_", name.lower()).strip("_.")


def shortest(path: Path) -> str:
    """Relative to the repository's root where it lies inside."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def grpo(arguments: Sequence[str], log: Path) -> int:
    """The exit code of a command in a process of its own, with one thread; what it prints is in `log`."""
    # PYTHONPATH for classes by FILE.CLASS. Idle threads sleep, and leave the cores to the other runs.
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "grpo_lightning", *arguments]
    with log.open("w") as file:
        return subprocess.run(command, cwd=ROOT, env=os.environ | own, stdout=file, stderr=file, check=False).returncode


def train(run: Run) -> tuple[float, str]:
    """Makes one run, its output in log.txt; returns seconds and, if it failed, why."""
    run.folder.mkdir(parents=True)
    log, started = run.folder / "log.txt", time.perf_counter()
    code = grpo(run.arguments, log)
    seconds = time.perf_counter() - started
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return seconds, lines[-1] if lines else f"exit code {code}"
    run.marker.write_text(json.dumps({"arguments": run.arguments, "seconds": round(seconds, 1)}, indent=2))
    return seconds, ""


def run_all(runs: Sequence[Run], workers: int) -> dict[str, str]:
    """Makes the runs, several at a time, and prints a line per run. Returns by name why runs failed."""
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(workers) as pool:
        pending = {pool.submit(train, run): run for run in runs}
        try:
            for count, future in enumerate(as_completed(pending), start=1):
                run, (seconds, error) = pending[future], future.result()
                say = f"failed: {error} (see {shortest(run.folder)}/log.txt)" if error else f"{seconds:.0f} s"
                print(f"{count}/{len(runs)} {run.name}: {say}", flush=True)
                if error:
                    failures[run.name] = error
        except KeyboardInterrupt:  # the runs have got the signal too
            pool.shutdown(wait=False, cancel_futures=True)
            sys.exit("run_experiment: interrupted; what is complete is kept")
    return failures


def make_models(runs: Sequence[Run]) -> None:
    """Makes policies and reward models if a run's options or files name them and they are not there."""
    arguments = {argument for run in runs for argument in run.arguments}
    files = {ROOT / argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")}
    texts = [*arguments, *(file.read_text() for file in files if file.exists())]
    for folder, command in RECIPES.items():
        if not (ROOT / folder).exists() and any(folder in text for text in texts):
            print(f"making {folder}", flush=True)
            subprocess.run([sys.executable, *command.split(), "--out", folder], cwd=ROOT, check=True)


def compare(experiment: Experiment, runs: Sequence[Run], out: Path) -> str:
    """Writes out.md and out.png of the complete runs; returns the tables."""
    from compare_runs import write

    from grpo_lightning.plugins.looking.report.arm_comparison import Metric

    folders: dict[str, list[Path]] = {arm: [] for arm in experiment.arms}
    for run in runs:
        if run.is_complete():
            folders[run.arm].append(run.folder)
    metrics = [Metric.parse(metric) for metric in experiment.metrics]
    return write({arm: found for arm, found in folders.items() if found}, metrics, experiment.x, out)


def inserted(readme: str, tables: str) -> str:
    """The README with the tables between the marks.

    Raises:
        Mistake: The marks are not there, once each and in order.
    """
    if readme.count(OPEN) != 1 or readme.count(CLOSE) != 1 or readme.index(OPEN) > readme.index(CLOSE):
        raise Mistake(f"README.md of the experiment: it needs the lines {OPEN} and {CLOSE}, once each")
    before, after = readme.split(OPEN)[0], readme.split(CLOSE)[1]
    return f"{before}{OPEN}\n{tables.strip()}\n{CLOSE}{after}"


def check(experiment: Experiment, folder: Path, write: bool) -> None:
    """Finds before the runs what would fail after them.

    Raises:
        ValueError: A metric or an axis is none, or the README cannot take the tables.
    """
    from grpo_lightning.plugins.looking.report.arm_comparison import AXES, Metric

    for metric in experiment.metrics:
        Metric.parse(metric)
    if unknown := set(experiment.x) - AXES.keys():
        raise Mistake(f"x: {', '.join(sorted(unknown))}: give any of {', '.join(AXES)}")
    if write:
        readme = folder / "README.md"
        inserted(readme.read_text(encoding="utf-8") if readme.exists() else "", "")


def execute(folder: Path, workers: int, again: bool, write: bool, dry_run: bool) -> None:
    """Runs what is missing, compares, and reports what failed."""
    experiment = Experiment.read(folder)
    check(experiment, folder, write)
    into = ROOT / "runs" / "experiments" / experiment.name
    runs = experiment.runs(into)
    missing = [run for run in runs if again or not run.is_complete()]
    if dry_run:
        print("\n".join(shlex.join(["grpo", *run.arguments]) for run in missing))
        return
    foreign = [run for run in missing if run.folder.exists() and not (run.folder / "log.txt").exists()]
    if foreign:
        raise Mistake(f"{foreign[0].folder}: this is no run of this program, since it has no log.txt. Move it away")
    print(f"{len(runs)} runs, {len(missing)} to make", flush=True)
    failures: Mapping[str, str] = {}
    if missing:
        make_models(missing)
        for run in missing:
            shutil.rmtree(run.folder, ignore_errors=True)
        failures = run_all(missing, workers)
    out = into / "results"
    if any(run.is_complete() for run in runs):
        print(f"\n{compare(experiment, runs, out)}\n{shortest(out)}.md, {shortest(out)}.png")
    if failures:
        raise Mistake(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(failures)}")
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
    try:
        execute(**vars(options))
    except ValueError as error:
        sys.exit(f"run_experiment: {error}")


if __name__ == "__main__":
    main()
