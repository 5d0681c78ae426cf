"""`grpo init`: a project to begin with, or an example to change."""

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.packaged import CONFIGS
from grpo_lightning.types import UsageError, require

EXAMPLES = CONFIGS.with_name("examples")
"""A folder for each example, with a README; in the repository a link to the folder at its top."""


def main(args: Sequence[str] | None = None) -> int:
    """Copies an example into the folder that the options name; returns the exit code."""
    readmes = {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*/README.md"))}
    titles = "\n".join(f"  {name:<20} {readme.splitlines()[0].strip('# ')}" for name, readme in readmes.items())
    parser = argparse.ArgumentParser(
        "grpo init",
        description="""Writes a project that runs: a configuration, a few questions, a reward and a README. A tiny
policy is installed with grpo_lightning, so that the project trains within seconds, on a CPU and without
a network. With --example it writes another of the examples below.""",
        epilog=f"The examples:\n{titles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="the folder to make")
    parser.add_argument("--example", default="project", help="the example to write")
    options = parser.parse_args(args)
    # NEW/../OLD is OLD, although there is no NEW.
    folder = Path(os.path.normpath(options.folder))
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_free, f"{folder}: something is there already. Give a folder that does not exist")
    require(options.example in readmes, f"--example {options.example}: there is none. There are:\n{titles}")
    try:
        ignored = shutil.ignore_patterns("__pycache__")
        example = EXAMPLES / options.example
        shutil.copytree(example, folder, copy_function=shutil.copyfile, ignore=ignored, dirs_exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: it cannot be written ({error}). Give another folder") from error
    print(f"{folder}: {', '.join(sorted(os.listdir(folder)))}")
    # The commands above the README's list train; the commands in the list come later.
    commands = re.findall("^grpo .*", readmes[options.example].partition("\n- ")[0], re.MULTILINE)
    print("To train:", " && ".join([f"cd {folder}", *commands]))
    return 0
