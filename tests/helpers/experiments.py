"""Experiments as `grpo sweep` reads them, and the command lines of their runs."""

from collections.abc import Mapping
from pathlib import Path

import yaml


def write_experiment(folder: Path, experiment: Mapping[str, object]) -> Path:
    """Writes an experiment's folder; a key that is None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {key: value for key, value in experiment.items() if value is not None}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(options, sort_keys=False))
    return folder


def option(arguments: list[str], name: str) -> str:
    """The value of an option that a command line has once."""
    [value] = [argument.split("=", 1)[1] for argument in arguments if argument.startswith(f"--{name}=")]
    return value
