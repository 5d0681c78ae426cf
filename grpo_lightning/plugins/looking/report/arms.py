"""Finds runs in folders, and puts them together to arms: runs that differ in nothing but the seed."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as count_from
from pathlib import Path
from typing import Any

from grpo_lightning.disk import whole_files
from grpo_lightning.plugins.looking.report.arm_comparison import ComparisonTable, Metric, compare
from grpo_lightning.plugins.looking.run_files import run_configs as configs
from grpo_lightning.plugins.looking.run_files.run_configs import Config
from grpo_lightning.plugins.looking.run_files.run_graders import grader_of, rewards_of
from grpo_lightning.plugins.looking.run_files.run_scalars import EVENTS, TABLE, Scalars, read_scalars
from grpo_lightning.plugins.looking.run_files.run_validations import VALIDATIONS, ValuesByQuestion, read_validations
from grpo_lightning.types import UsageError, require


@dataclass(frozen=True)
class ReportedRun:
    """One run: its curves and its configuration."""

    folder: Path
    """The run's folder."""
    scalars: Scalars
    """The curves."""
    config: Config | None
    """The options, without seeds and folders; None if there is no config.yaml."""
    seed: str
    """`seed_everything`, or the folder's name if there is none."""
    arm: str | None = None
    """The name of the arm by the folders; None if the configuration decides."""
    changes: Sequence[str] = ()
    """A text for each later start with other options."""
    questions: Mapping[str, ValuesByQuestion] = field(default_factory=dict)
    """The values of each validation question by scalar; empty for a run of an earlier version."""

    @property
    def steps(self) -> int:
        """Exploration steps that the run has made."""
        return 1 + max(points[-1][0] for points in self.scalars.values())

    def num_questions(self, name: str) -> str:
        """Returns the number of questions of a scalar of a validation and a space; empty if it is not known."""
        values = self.questions.get(name)
        return f"{len(next(iter(values.by_step.values())))} " if values else ""

    def total(self, name: str) -> float:
        """Returns the sum of a scalar over the steps."""
        return math.fsum(value for _, value in self.scalars.get(name, []) if math.isfinite(value))


GRADED = r"val/(greedy|(avg|pass|maj)@\d+|ci95)"
"""Scalars that hold what the run's grader decides; that of a validation with a name is in `validations.jsonl`."""


REASONS = {
    "another grader": "are graded differently",
    "other rewards": "are trained with different rewards",
    "other questions": "answer different validation questions",
}
"""What the notes say of the reasons why there is no difference."""


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but the seed."""

    name: str
    """The arm's name, from its folders."""
    runs: dict[str, ReportedRun]
    """The runs by seed."""

    def shown(self, key: str) -> str:
        """Returns the value of a key, or the values of the runs if they differ; a dash for a run without the key."""
        return " / ".join(dict.fromkeys(configs.value_of(run.config or {}, key) for run in self.runs.values()))

    def obstacle(self, base: "Arm", name: str) -> str:
        """Returns why a scalar does not compare with the same scalar of another arm; empty if it does."""
        configs_by_arm = [[run.config or {} for run in arm.runs.values()] for arm in (self, base)]
        if re.fullmatch(GRADED, name) and _differ(grader_of, *configs_by_arm):
            return "another grader"
        # One reward, reward/NAME/mean, compares whatever the others are.
        is_total = re.fullmatch(r"reward/[^/]+|val/([\w-]+/)?reward", name)
        return "other rewards" if is_total and _differ(rewards_of, *configs_by_arm) else ""


def compare_arms(arms: Sequence[Arm], metrics: Sequence[Metric], axis: str) -> ComparisonTable:
    """Compares arms along an axis, by seed and question, where nothing speaks against it; the first is the base."""
    arm_by_name = {arm.name: arm for arm in arms}
    return compare(
        {arm.name: {seed: run.scalars for seed, run in arm.runs.items()} for arm in arms},
        metrics,
        axis,
        {arm.name: {seed: run.questions for seed, run in arm.runs.items()} for arm in arms},
        lambda name, scalar: arm_by_name[name].obstacle(arms[0], scalar),
    )


def reservations(arms: Sequence[Arm], metrics: Sequence[Metric], comparisons: Sequence[ComparisonTable]) -> list[str]:
    """Returns a text for each reason why differences are missing, or pair seeds alone.

    Args:
        arms: The arms; the first is the base.
        metrics: The columns of the tables.
        comparisons: The tables that the notes stand above.
    """
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    for comparison in comparisons:
        for arm, cells in comparison.cells.items():
            for metric, cell in zip(metrics, cells, strict=True):
                if cell.reason in REASONS:
                    names_by_reason.setdefault((arm, cell.reason), []).append(metric.name)
    notes = [
        f"{arm} and {arms[0].name} {REASONS[reason]}: no difference in {', '.join(dict.fromkeys(scalars))}"
        for (arm, reason), scalars in names_by_reason.items()
    ]
    runs = [run for arm in arms for run in arm.runs.values()]
    num_without = sum(not run.questions for run in runs)
    are_graded = any(metric.name.startswith("val/") for metric in metrics)
    if num_without and are_graded and len(arms) > 1:
        notes.append(f"{num_without} of {len(runs)} runs have no {VALIDATIONS}: their differences pair seeds alone")
    return notes


def read_runs(arguments: Sequence[Path | str]) -> list[ReportedRun]:
    """Reads the runs in the folders of a command line.

    An argument is a run's folder, or one that holds runs: `arm/seed`, or `experiment/arm/seed`.
    """
    run_by_folder: dict[Path, ReportedRun] = {}
    for argument in map(Path, arguments):
        folders = run_folders(argument)
        depth = len(folders[0].relative_to(argument).parts)
        runs = [read_run(folder, folder.parent.name if depth == 2 else None) for folder in folders]
        if depth == 1 and len(runs) > 1 and all(run.config == runs[0].config for run in runs) and not _repeats(runs):
            runs = [replace(run, arm=argument.resolve().name) for run in runs]
        for run in runs:
            run_by_folder.setdefault(run.folder.resolve(), run)
    return list(run_by_folder.values())


def run_folders(argument: Path) -> list[Path]:
    """Returns the folder itself if it is a run's; otherwise the runs in it, or in its folders."""
    require(argument.is_dir(), f"{argument}: there is no such folder. Give that of a run, or one that holds runs")
    for below in ("", "*/", "*/*/"):
        if files := [file for name in (EVENTS, TABLE) for file in whole_files(argument, below + name)]:
            return sorted({file.parent for file in files}, key=lambda folder: _natural(str(folder)))
    raise UsageError(
        f"{argument}: no curves (events.out.tfevents.* or metrics.csv) in it, nor one or two folders below. Give the "
        "folder of a run of `grpo fit`, or a folder arm/seed. A run in Python needs a logger: TensorBoardLogger(RUN, "
        'name="", version=""), or CSVLogger with the same'
    )


def read_run(folder: Path, arm: str | None = None) -> ReportedRun:
    """Reads the curves and the configuration of a run."""
    scalars = read_scalars(folder)
    require(bool(scalars), f"{folder}: its curves hold no readable scalars. Wait for the first step, or leave it out")
    raw = configs.read_config(folder / "config.yaml")
    if raw is None:
        return ReportedRun(folder, scalars, None, folder.name, arm, questions=read_validations(folder))
    seed = raw.get("seed_everything")
    name = folder.name if isinstance(seed, bool) or not isinstance(seed, int) else str(seed)
    starts = configs.starts_of(folder, raw)
    changes = configs.changes_of(starts)
    return ReportedRun(folder, scalars, configs.merged(starts), name, arm, changes, read_validations(folder))


def arms_of(runs: Sequence[ReportedRun]) -> list[Arm]:
    """Puts runs of equal configuration together, and names them as their folders do."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        key = str(run.folder.resolve())
        if run.arm is not None:
            key = str(run.folder.resolve().parent)
        elif run.config is not None:
            key = json.dumps(run.config, sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    runs_of_arms = [arm_runs for group in groups.values() for arm_runs in _split(group)]
    return [
        Arm(name, {run.seed: run for run in sorted(arm_runs, key=lambda run: _natural(run.seed))})
        for name, arm_runs in zip(names(runs_of_arms), runs_of_arms, strict=True)
    ]


def names(groups: Sequence[Sequence[ReportedRun]]) -> list[str]:
    """Returns a clear name of each group of runs: its common folder, or its first run if groups share a folder."""
    folders = [Path(os.path.commonpath([run.folder.resolve() for run in group])) for group in groups]
    # A seed is no name of an arm.
    folders = [
        folder.parent if group[0].config and folder.name == group[0].seed else folder
        for folder, group in zip(folders, groups, strict=True)
    ]
    if len({*folders}) < len(folders):
        folders = [group[0].folder.resolve() for group in groups]
    # The fewest last names of each path that tell it from the others.
    count = next(n for n in count_from(1) if len({folder.parts[-n:] for folder in folders}) == len({*folders}))
    short = ["/".join(folder.parts[-count:]) for folder in folders]
    arm_names = [group[0].arm or path for group, path in zip(groups, short, strict=True)]
    return [name if arm_names.count(name) == 1 else path for name, path in zip(arm_names, short, strict=True)]


def _split(group: list[ReportedRun]) -> list[list[ReportedRun]]:
    """Returns the group; if a seed repeats, the group by folder; and if it repeats even there, each run alone.

    Folders that name the arm name the seeds too.
    """
    if not _repeats(group):
        return [group]
    if group[0].arm is not None:
        return [[replace(run, seed=run.folder.name) for run in group]]
    by_folder: dict[Path, list[ReportedRun]] = {}
    for run in group:
        by_folder.setdefault(run.folder.resolve().parent, []).append(run)
    groups: list[list[ReportedRun]] = []
    for runs in by_folder.values():
        groups += [[run] for run in runs] if _repeats(runs) else [runs]
    return groups


def _repeats(runs: Sequence[ReportedRun]) -> bool:
    return len({run.seed for run in runs}) < len(runs)


def _differ(read: Callable[[Config], Any], configs: Sequence[Config], base_configs: Sequence[Config]) -> bool:
    """Returns True if what is read in the configurations of two arms differs, where it is known."""
    values, base_values = ([value for config in arm if (value := read(config))] for arm in (configs, base_configs))
    return any(value != base_value for value in values for base_value in base_values)


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts 9 before 10."""
    return [(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in re.split(r"(\d+)", text) if word]
