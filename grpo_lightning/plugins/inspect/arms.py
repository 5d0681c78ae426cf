"""Runs found in folders, and put together to arms: runs that differ in nothing but the seed."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning import history
from grpo_lightning.plugins.inspect.scalars import Scalars, folders_of_runs, read_scalars
from grpo_lightning.types import UsageError

Config = dict[str, Any]
"""Plain values by dotted key. A class stands under the key of what it fills, its arguments below."""

SEEDS = {"seed_everything", "loop.seed", "data.seed"}
FOLDERS = {"trainer.default_root_dir", "ckpt_path", "config"}
PRINTED = {"trainer.enable_progress_bar", "trainer.enable_model_summary", "memory.show"}
"""What changes the console alone."""
IGNORED = SEEDS | FOLDERS | PRINTED
"""Keys in which the runs of one arm may differ."""

MOST_KEYS = 3
"""A name is made of so many differences at most, unless it takes all."""
LONGEST = 32
"""Characters of a value in a name."""


@dataclass(frozen=True)
class Run:
    """One run: its curves, and what it was configured with."""

    folder: Path
    scalars: Scalars
    config: Config | None
    """Without seeds and folders; None: there is no config.yaml."""
    seed: str
    """`seed_everything`, or the folder's name where there is none."""
    arm: str | None = None
    """The arm that the folders name; None: the configuration tells."""
    changes: Sequence[str] = ()
    """`changed at step 5: model.optimizer.lr 3e-4 → 1e-4`, a text for each start with other options."""

    @property
    def inspector(self) -> Path | None:
        """The page of `grpo inspect`, where it exists."""
        page = self.folder / "inspect.html"
        return page if page.is_file() else None


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but the seed."""

    name: str
    runs: dict[str, Run]
    """By seed."""

    def shown(self, key: str) -> str:
        """The value of a key, or those of its runs where they differ; a dash where a run does not have it."""
        configs = [run.config or {} for run in self.runs.values()]
        return " / ".join(dict.fromkeys(shown(config[key]) if key in config else "–" for config in configs))


def read_runs(arguments: Sequence[Path | str]) -> list[Run]:
    """Reads the runs in the folders of a command line.

    Args:
        arguments: Folders of runs, or folders that hold some: `arm/seed`, or `experiment/arm/seed`.

    Raises:
        UsageError: A folder does not exist or holds no run, or a config.yaml is broken.
    """
    found: dict[Path, Run] = {}
    for argument in map(Path, arguments):
        folders = run_folders(argument)
        depth = len(folders[0].relative_to(argument).parts)
        runs = [read_run(folder, folder.parent.name if depth == 2 else None) for folder in folders]
        alike = all(run.config == runs[0].config for run in runs) and len({run.seed for run in runs}) == len(runs)
        if depth == 1 and len(runs) > 1 and alike:
            runs = [replace(run, arm=argument.resolve().name) for run in runs]
        for run in runs:
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


def run_folders(argument: Path) -> list[Path]:
    """The folder itself if it is a run's; otherwise the runs in it, or in its folders.

    Raises:
        UsageError: It does not exist, or there is no run.
    """
    if not argument.is_dir():
        raise UsageError(f"{argument}: there is no such folder. Give the folder of a run, or one that holds runs")
    for pattern in ("", "*/", "*/*/"):
        if folders := folders_of_runs(argument, pattern):
            return sorted(folders, key=lambda folder: _natural(str(folder)))
    raise UsageError(
        f"{argument}: no curves (events.out.tfevents.* or metrics.csv) in it, nor one or two folders below. Give the "
        "folder of a run of `grpo fit`, or a folder arm/seed. A run in Python needs a logger: TensorBoardLogger(RUN, "
        'name="", version=""), or CSVLogger with the same'
    )


def read_run(folder: Path, arm: str | None = None) -> Run:
    """Reads the curves and the configuration of a run.

    Raises:
        UsageError: It has no scalars, its name is no Unicode, or its config.yaml is broken.
    """
    try:
        scalars = read_scalars(folder)
    except UnicodeEncodeError as error:
        raise UsageError(f"{folder}: TensorBoard reads no path that is not Unicode. Rename it") from error
    if not scalars:
        raise UsageError(f"{folder}: its curves hold no readable scalars. Wait for the first step, or leave it out")
    raw = read_config(folder / "config.yaml")
    if raw is None:
        return Run(folder, scalars, None, folder.name, arm)
    seed = raw.get("seed_everything")
    known = isinstance(seed, int) and not isinstance(seed, bool)
    before = [(until, comparable(options)) for until, options in history.earlier(folder)]
    config = history.merged(before, comparable(raw), shown)
    return Run(folder, scalars, config, str(seed) if known else folder.name, arm, changes_of(folder, raw))


def comparable(raw: dict[str, Any]) -> Config:
    """The options in which the runs of one arm agree."""
    return {key: value for key, value in flat(_without(raw, _root(raw))).items() if key not in IGNORED}


def changes_of(folder: Path, newest: dict[str, Any]) -> list[str]:
    """What a run was started again with: `changed at step 5: model.optimizer.lr 3e-4 → 1e-4`, a text per start."""
    starts = [(until, comparable(options)) for until, options in history.earlier(folder)]
    found = []
    for (until, old), (_, new) in pairwise([*starts, (0, comparable(newest))]):
        keys = primary(list(history.changed(old, new)), [old, new])
        both = ((key, *(shown(options[key]) if key in options else "–" for options in (old, new))) for key in keys)
        texts = ", ".join(f"{key} {value} → {other}" for key, value, other in both)
        found += [f"changed at step {until + 1}: {texts}"] if keys else []
    return found


def read_config(path: Path) -> dict[str, Any] | None:
    """A run's config.yaml; None if there is none.

    Raises:
        UsageError: It cannot be read, or is no mapping.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{path}: it cannot be read ({why}). Fix it, or remove it to go by the folders") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: it holds no keys. Fix it, or remove it to go by the folders")
    return config


def flat(value: Any, key: str = "") -> Config:
    """Plain values by dotted key: `model.optimizer: AdamW`, `model.optimizer.lr: 0.1`; parts of lists by index."""
    if isinstance(value, Mapping):
        found: Config = {}
        for name, inner in value.items():
            if name == "class_path" and key:
                found[key] = str(inner).removeprefix("grpo_lightning.")
            elif name in ("init_args", "dict_kwargs") and "class_path" in value:
                found |= flat(inner, key)
            else:
                found |= flat(inner, f"{key}.{name}" if key else str(name))
        return found
    if isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        parts = [flat(inner, f"{key}.{index}") for index, inner in enumerate(value)]
        return {name: inner for part in parts for name, inner in part.items()}
    return {key: value}


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Puts runs of equal configuration together, and names them as their folders do, or by their differences.

    Runs that have the seed in common too are no seeds of one arm. They are told apart by their folders.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_kind(run), []).append(run)
    whole = [part for group in groups.values() for part in _split(group)]
    return [
        Arm(name, {run.seed: run for run in sorted(part, key=lambda run: _natural(run.seed))})
        for name, part in zip(names(whole), whole, strict=True)
    ]


def names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The shortest clear name of each group of runs: that of its folder, where each group is one run."""
    configs = [group[0].config for group in groups]
    told = dict.fromkeys(range(len(groups)), "")
    unnamed = [index for index, group in enumerate(groups) if group[0].arm is None]
    has_seeds = any(len(group) > 1 for group in groups)
    if len(groups) > 1 and has_seeds and all(config is not None for config in configs):
        by_difference = difference_names([config or {} for config in configs])
        told |= {index: by_difference[index] for index in unnamed}
    folders = _short([_common(group) for group in groups])
    found = [group[0].arm or told[index] or folders[index] for index, group in enumerate(groups)]
    taken = Counter(found)
    found = [name if taken[name] == 1 else folders[index] for index, name in enumerate(found)]
    return [name if name not in found[:i] else f"{name} ({found[:i].count(name) + 1})" for i, name in enumerate(found)]


def difference_names(configs: Sequence[Config]) -> list[str]:
    """For each configuration the fewest differences that no other has together: `lr 1e-4`, `surrogate CISPO`.

    Empty where another configuration is equal.
    """
    keys = primary(differing(configs), configs)
    keys.sort(key=lambda key: key.startswith("trainer."))  # rarely what an experiment is about
    labels = short_keys(keys)
    found = []
    for index, config in enumerate(configs):
        others = [other for i, other in enumerate(configs) if i != index]

        def is_clear(chosen: Iterable[str], config: Config = config, others: list[Config] = others) -> bool:
            return not any(all(other.get(key) == config.get(key) for key in chosen) for other in others)

        sizes = range(1, min(MOST_KEYS, len(keys)) + 1)
        choices: Iterable[Sequence[str]] = (c for size in sizes for c in combinations(keys, size))
        chosen = next((c for c in choices if is_clear(c)), keys) if is_clear(keys) else ()
        found.append(", ".join(f"{labels[key]} {_cut(shown(config.get(key)))}" for key in chosen))
    return found


def differing(configs: Sequence[Config]) -> list[str]:
    """The keys whose values are not the same in all, in their order."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    missing = object()
    return [key for key in keys if any(config.get(key, missing) != configs[0].get(key, missing) for config in configs)]


def primary(keys: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """The differences that are not due to another: the arguments of a class that differs are left out."""
    return [
        key
        for key in keys
        if not any(key.startswith(f"{other}.") for other in keys) or all(key in config for config in configs)
    ]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The fewest last parts of each key that no other key ends with."""
    found = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]
        clear = (end for end in ends if not end.isdigit() and sum(f".{k}".endswith(f".{end}") for k in keys) == 1)
        found[key] = next(clear, key)
    return found


def shown(value: Any) -> str:
    """A value of a configuration in a few characters."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        mantissa, _, exponent = f"{value:e}".partition("e")
        if value and exponent and not -3 <= int(exponent) < 6:
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{value:g}"
    if isinstance(value, str):
        return value.rpartition(".")[2] if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value) else value
    return json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _kind(run: Run) -> str:
    if run.arm is not None:
        return f"folder {run.folder.resolve().parent}"
    if run.config is None:
        return f"run {run.folder.resolve()}"
    return "config " + json.dumps(run.config, sort_keys=True, default=str)


def _split(group: list[Run]) -> list[list[Run]]:
    """The group, or where a seed repeats its parts by folder; where it repeats even there, run by run.

    Where the folders name the arm they name the seeds too.
    """

    def repeats(runs: Sequence[Run]) -> bool:
        return len({run.seed for run in runs}) < len(runs)

    if not repeats(group):
        return [group]
    if group[0].arm is not None:
        return [[replace(run, seed=run.folder.name) for run in group]]
    by_folder: dict[Path, list[Run]] = {}
    for run in group:
        by_folder.setdefault(run.folder.resolve().parent, []).append(run)
    return [part for runs in by_folder.values() for part in ([[run] for run in runs] if repeats(runs) else [runs])]


def _root(config: Mapping[str, Any]) -> str:
    trainer = config.get("trainer")
    root = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
    return root if isinstance(root, str) else ""


def _without(value: Any, root: str) -> Any:
    """The configuration with the run's own folder cut off its paths."""
    if isinstance(value, dict):
        return {name: _without(inner, root) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without(inner, root) for inner in value]
    is_inside = root and isinstance(value, str) and (value == root or value.startswith(root.rstrip("/") + "/"))
    return "RUN" + value[len(root.rstrip("/")) :] if is_inside else value


def _common(group: Sequence[Run]) -> Path:
    folders = [str(run.folder.resolve()) for run in group]
    return Path(folders[0]) if len(group) == 1 else Path(os.path.commonpath(folders))


def _short(folders: Sequence[Path]) -> list[str]:
    """The fewest last parts of each folder that tell it from the others."""
    most = max(len(folder.parts) for folder in folders)
    for count in range(1, most + 1):
        if len({folder.parts[-count:] for folder in folders}) == len(set(folders)):
            break
    return ["/".join(folder.parts[-count:]) for folder in folders]


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts 9 before 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]
