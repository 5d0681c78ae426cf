"""`grpo init`: a project to begin with."""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.types import UsageError, require

PROJECT = Path(__file__).with_name("project")


def main(args: Sequence[str] | None = None) -> int:
    """Copies the project into the folder that the options name; returns the exit code."""
    parser = argparse.ArgumentParser(
        "grpo init",
        description="Writes a project that runs: a configuration, a few questions, a reward and a README. A tiny "
        "policy is installed with grpo_lightning, so that it trains within seconds, on a CPU and without a network.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to make")
    # NEW/../OLD is OLD, although there is no NEW.
    folder = Path(os.path.normpath(parser.parse_args(args).folder))
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_free, f"{folder}: something is there already. Give a folder that does not exist")
    try:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT, folder, copy_function=shutil.copyfile, ignore=ignored, dirs_exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: it cannot be written ({error}). Give another folder") from error
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"To train: cd {folder} && grpo fit --config run.yaml")
    return 0
