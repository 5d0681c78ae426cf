"""An experiment: the file that describes it, and the command lines of its runs."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.plugins.looking.report.arm_comparison import AXES, Metric
from grpo_lightning.types import UsageError, require

FILE = "experiment.yaml"
"""The name of the file in the folder of an experiment."""
KEYS = {"config", "args", "seeds", "arms", "grid", "metrics", "x"}
FIXED = {
    "trainer.enable_progress_bar": False,
    "trainer.enable_checkpointing": False,
    "completions.every_n_steps": 1_000_000,
    "loop.validate_first": False,  # the arms of an experiment begin alike
}
"""Default options of every run; the experiment may change them."""


@dataclass(frozen=True)
class ArmRun:
    """One arm with one seed."""

    arm: str
    """The name of the arm."""
    seed: int
    """The seed of the run."""
    folder: Path
    """The folder of the run."""
    args: list[str]
    """The command line of `grpo`, from `fit` on."""

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder / "log.txt"

    @property
    def marker(self) -> Path:
        """Written when the run is complete, with its command line."""
        return self.folder / "done.json"

    def is_complete(self) -> bool:
        """Returns True if the run has run to its end with this command line."""
        return self.marker.exists() and bool(json.loads(self.marker.read_text())["arguments"] == self.args)


@dataclass(frozen=True)
class Experiment:
    """The contents of experiment.yaml."""

    name: str
    """The name of the experiment: of its folder, or of its file."""
    config: list[str]
    """The `--config` files of every run."""
    args: dict[str, Any]
    """The options of every run."""
    seeds: list[int]
    """The seeds of every arm."""
    arms: dict[str, dict[str, Any]]
    """The options of each arm, crossed with the grid."""
    metrics: list[str]
    """What the arms are compared by; empty leaves it to the report."""
    axes: list[str]
    """What the curves are drawn over."""

    @classmethod
    def read(cls, path: Path) -> "Experiment":
        """Reads a file, or `experiment.yaml` in a folder.

        Raises:
            UsageError: It is not there, or does not have the form that `grpo sweep --help` shows.
        """
        file = path / FILE if path.is_dir() else path
        require(file.is_file(), f"{file} does not exist: give a file, or a folder with {FILE}")
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise UsageError(f"{file}: it is no YAML: {error}") from error
        is_complete = isinstance(content, dict) and "seeds" in content and {"arms", "grid"} & content.keys()
        if not is_complete or not content.keys() <= KEYS:
            raise UsageError(f"{file}: give seeds, and arms or a grid, and of {', '.join(sorted(KEYS))} nothing else")
        arms = {str(name): as_options(options) for name, options in as_options(content.get("arms", {"": {}})).items()}
        arms = crossed(arms, {key: as_values(values) for key, values in as_options(content.get("grid")).items()})
        slugs = [slug(arm) for arm in arms]
        if not arms or len(set(slugs)) < len(slugs) or "" in slugs:
            raise UsageError(f"{file}: the arms need names whose letters and digits differ; they are {', '.join(arms)}")
        seeds = content["seeds"]
        is_list = isinstance(seeds, list) and all(isinstance(seed, int) for seed in seeds)
        require(is_list and bool(seeds), f"{file}: seeds: give one seed or more as a list, not {seeds}")
        experiment = cls(
            file.resolve().parent.name if file.name == FILE else file.stem,
            config=as_list(content.get("config")),
            args=as_options(content.get("args")),
            seeds=[*dict.fromkeys(seeds)],
            arms=arms,
            metrics=as_list(content.get("metrics")),
            axes=as_list(content.get("x", "step")),
        )
        for metric in experiment.metrics:
            Metric.parse(metric)
        if unknown := set(experiment.axes) - AXES.keys():
            raise UsageError(f"{file}: x: {', '.join(sorted(unknown))}: give any of {', '.join(AXES)}")
        return experiment

    def runs(self, folder: Path) -> list[ArmRun]:
        """Returns every run, into `folder`/<arm>/<seed>; seed by seed, so that early results are of all arms."""
        return [self.run(arm, seed, folder) for seed in self.seeds for arm in self.arms]

    def run(self, arm: str, seed: int, folder: Path) -> ArmRun:
        """Returns one arm with one seed."""
        run_folder = folder / slug(arm) / str(seed)
        arm_options = dict(self.arms[arm])
        files = [*self.config, *as_list(arm_options.pop("config", None))]
        # What the arm sets comes last: an option of a class follows the class.
        options = {key: value for key, value in (FIXED | self.args).items() if key not in arm_options} | arm_options
        options |= {"seed_everything": seed, "trainer.default_root_dir": str(run_folder)}
        flags = [f"--{key}={as_text(value)}" for key, value in options.items()]
        return ArmRun(arm, seed, run_folder, ["fit", *(f"--config={file}" for file in files), *flags])


def as_list(value: Any) -> list[str]:
    """Returns nothing, one value or several as a list of texts."""
    return [] if value is None else [str(item) for item in (value if isinstance(value, list) else [value])]


def as_options(value: Any) -> dict[str, Any]:
    """Returns names and values; none for nothing."""
    require(isinstance(value or {}, dict), f"the experiment's args, arms and grid: give names and values, not {value}")
    return value or {}


def as_values(values: Any) -> list[Any]:
    """Returns the values of an option in a grid."""
    if not isinstance(values, list) or not values:
        raise UsageError(f"grid: give a list of values for each option, not {values}")
    return values


def crossed(arms: Mapping[str, dict[str, Any]], grid: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Returns each arm with each combination of the grid's values, named by them: `base, lr 0.0003, group_size 8`."""
    arms_of_grid = {}
    for (arm, options), values in product(arms.items(), product(*grid.values())):
        combination = dict(zip(grid, values, strict=True))
        names = [f"{key.rpartition('.')[2]} {as_text(value)}" for key, value in combination.items()]
        arms_of_grid[", ".join([*([arm] if arm else []), *names])] = options | combination
    return arms_of_grid


def as_text(value: Any) -> str:
    """Returns a value of YAML as it stands on a command line; a list or a dict as JSON, which is YAML too."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def slug(name: str) -> str:
    """Returns a folder's name for an arm: beta 0.04 -> beta_0.04."""
    return re.sub(r"[^a-z0-9.]+", "_", name.lower()).strip("_.")
