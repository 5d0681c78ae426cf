"""Runs found in folders, and put together to arms: runs that differ in nothing but the seed."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as count_from
from pathlib import Path

from grpo_lightning.disk import whole_files
from grpo_lightning.plugins.looking.run_files import run_configs as configs
from grpo_lightning.plugins.looking.run_files.run_configs import Config
from grpo_lightning.plugins.looking.run_files.run_scalars import EVENTS, TABLE, Scalars, read_scalars
from grpo_lightning.types import UsageError, require


@dataclass(frozen=True)
class Run:
    """One run: its curves, and what it was configured with."""

    folder: Path
    scalars: Scalars
    config: Config | None  # without seeds and folders; None: there is no config.yaml
    seed: str  # `seed_everything`, or the folder's name where there is none
    arm: str | None = None  # the arm that the folders name; None: the configuration tells
    changes: Sequence[str] = ()

    @property
    def steps(self) -> int:
        """Exploration steps that it has made."""
        return 1 + max(points[-1][0] for points in self.scalars.values())

    def total(self, name: str) -> float:
        """The sum of a scalar over the steps."""
        return math.fsum(value for _, value in self.scalars.get(name, []) if math.isfinite(value))


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but the seed."""

    name: str
    runs: dict[str, Run]

    def shown(self, key: str) -> str:
        """The value of a key, or those of its runs where they differ; a dash where a run does not have it."""
        return " / ".join(dict.fromkeys(configs.value_of(run.config or {}, key) for run in self.runs.values()))


def read_runs(arguments: Sequence[Path | str]) -> list[Run]:
    """Reads the runs in the folders of a command line.

    An argument is a run's folder, or one that holds runs: `arm/seed`, or `experiment/arm/seed`.
    """
    found: dict[Path, Run] = {}
    for argument in map(Path, arguments):
        folders = run_folders(argument)
        depth = len(folders[0].relative_to(argument).parts)
        runs = [read_run(folder, folder.parent.name if depth == 2 else None) for folder in folders]
        if depth == 1 and len(runs) > 1 and all(run.config == runs[0].config for run in runs) and not _repeats(runs):
            runs = [replace(run, arm=argument.resolve().name) for run in runs]
        for run in runs:
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


def run_folders(argument: Path) -> list[Path]:
    """The folder itself if it is a run's; otherwise the runs in it, or in its folders."""
    require(argument.is_dir(), f"{argument}: there is no such folder. Give that of a run, or one that holds runs")
    for below in ("", "*/", "*/*/"):
        if files := [file for name in (EVENTS, TABLE) for file in whole_files(argument, below + name)]:
            return sorted({file.parent for file in files}, key=lambda folder: _natural(str(folder)))
    raise UsageError(
        f"{argument}: no curves (events.out.tfevents.* or metrics.csv) in it, nor one or two folders below. Give the "
        "folder of a run of `grpo fit`, or a folder arm/seed. A run in Python needs a logger: TensorBoardLogger(RUN, "
        'name="", version=""), or CSVLogger with the same'
    )


def read_run(folder: Path, arm: str | None = None) -> Run:
    """Reads the curves and the configuration of a run."""
    scalars = read_scalars(folder)
    require(bool(scalars), f"{folder}: its curves hold no readable scalars. Wait for the first step, or leave it out")
    raw = configs.read_config(folder / "config.yaml")
    if raw is None:
        return Run(folder, scalars, None, folder.name, arm)
    seed = raw.get("seed_everything")
    name = folder.name if isinstance(seed, bool) or not isinstance(seed, int) else str(seed)
    starts = configs.starts_of(folder, raw)
    return Run(folder, scalars, configs.merged(starts), name, arm, configs.changes_of(starts))


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Puts runs of equal configuration together, and names them as their folders do."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        own = run.folder.resolve() if run.config is None else json.dumps(run.config, sort_keys=True, default=str)
        groups.setdefault(str(own if run.arm is None else run.folder.resolve().parent), []).append(run)
    whole = [part for group in groups.values() for part in _split(group)]
    return [
        Arm(name, {run.seed: run for run in sorted(part, key=lambda run: _natural(run.seed))})
        for name, part in zip(names(whole), whole, strict=True)
    ]


def names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A clear name of each group of runs: that of the folder around them, or of the first where others share that."""
    folders = [Path(os.path.commonpath([run.folder.resolve() for run in group])) for group in groups]
    if len({*folders}) < len(folders):
        folders = [group[0].folder.resolve() for group in groups]
    # The fewest last parts of each folder that tell it from the others.
    count = next(n for n in count_from(1) if len({folder.parts[-n:] for folder in folders}) == len({*folders}))
    short = ["/".join(folder.parts[-count:]) for folder in folders]
    found = [group[0].arm or name for group, name in zip(groups, short, strict=True)]
    return [name if found.count(name) == 1 else whole for name, whole in zip(found, short, strict=True)]


def _split(group: list[Run]) -> list[list[Run]]:
    """The group, or where a seed repeats its parts by folder; where it repeats even there, run by run.

    Where the folders name the arm they name the seeds too.
    """
    if not _repeats(group):
        return [group]
    if group[0].arm is not None:
        return [[replace(run, seed=run.folder.name) for run in group]]
    by_folder: dict[Path, list[Run]] = {}
    for run in group:
        by_folder.setdefault(run.folder.resolve().parent, []).append(run)
    return [part for runs in by_folder.values() for part in ([[run] for run in runs] if _repeats(runs) else [runs])]


def _repeats(runs: Sequence[Run]) -> bool:
    return len({run.seed for run in runs}) < len(runs)


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts 9 before 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]
