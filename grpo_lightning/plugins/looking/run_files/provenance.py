"""What made a run: versions, commit, machine, command line, seed and data of each of its starts."""

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.packaged import CONFIGS
from grpo_lightning.plugins.looking.run_files.run_configs import PASSWORD, SECRET
from grpo_lightning.tasks.question_digest import digest_of_question, digest_of_set
from grpo_lightning.types import Question, UsageError

FILE = "provenance.yaml"
"""The file in the folder of a run, a list with an entry per start."""

OF_A_START = ("step", "time", "command", "seed", "precision")
"""Keys of an entry that are not compared: each start has its own, or they are options too."""

SECRET_VALUE = re.compile(
    rf"((?<!\w)(?:{SECRET.pattern.removeprefix('(?i)')})(?:[=\0]|['\"]?: *['\"]?))(?:(?<=[=\0])[^\0]+|[^\0'\"}}\]]+)",
    re.IGNORECASE,
)
"""A key or password in a command whose words are divided by `\\0`: after `--key=`, after `--key`, or in YAML."""

PROJECT = CONFIGS.parents[1]
"""The folder that the package stands in: that of the clone, or `site-packages`."""

GIT_SECONDS = 10
"""The time that git may take."""

MAX_HASHED = 200_000
"""Questions of a split that are hashed: a large task makes its questions when they are read."""

Start = dict[str, Any]
"""What made one start of a run, as plain values."""


def environment() -> Start:
    """Returns the versions and the hardware of this process."""
    import torch  # a reader of the file need not wait for it

    return {
        "grpo_lightning": version_of("grpo-lightning"),
        "commit": commit_of(PROJECT),
        # The version of torch's metadata lacks the build.
        "torch": str(torch.__version__),
        "transformers": version_of("transformers"),
        "lightning": version_of("lightning"),
        "python": platform.python_version(),
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def version_of(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit_of(folder: Path) -> str | None:
    """Returns the commit of a clone, with `+changes` if files differ from it; None without a clone or without git."""
    if not (folder / ".git").exists():
        return None
    git = ["git", "--no-optional-locks", f"--git-dir={folder / '.git'}", f"--work-tree={folder}"]
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        described = subprocess.run(
            [*git, *describe], cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def command_line(words: Sequence[str]) -> str:
    """Returns a command with `***` in place of keys and passwords.

    Args:
        words: The interpreter, and its arguments.
    """
    text = "\0".join(words if "-m" in words[1:2] else words[1:])
    program, *arguments = PASSWORD.sub("***@", SECRET_VALUE.sub(r"\1***", text)).split("\0")
    return shlex.join([Path(program).name, *arguments])


def hash_of(questions: Sequence[Question]) -> str:
    """Returns a hash of questions and answers in their order, and the number: `1f0c2d3e4a5b6c7d (256 questions)`."""
    digest = digest_of_set(map(digest_of_question, islice(questions, MAX_HASHED)))
    return f"{digest} ({len(questions)} questions)"


def start_of(trainer: Any, seed: int) -> Start:
    """Returns what makes the run that a trainer begins, with the data that it has read."""
    data = trainer.datamodule
    splits = dict(data.questions)
    for name, benchmark in data.validations.items():
        splits[name] = benchmark.data.questions.get(benchmark.split, ())
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment(),
        "command": command_line(sys.orig_argv),
        "seed": seed,
        "world_size": trainer.world_size,
        "precision": str(trainer.precision),
        "data": {name: hash_of(questions) for name, questions in splits.items() if len(questions)},
    }


def read_starts(run: Path | str) -> list[Start]:
    """Reads what made each start of a run; empty if the run's folder does not say it."""
    path = Path(run, FILE)
    if not path.is_file():
        return []
    try:
        return [dict(start) for start in yaml.safe_load(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: no list of the starts of a run ({type(error).__name__}). Restore it") from error


def newest_start(run: Path | str) -> Start:
    """Returns what made the newest start of a run; empty if it is unknown."""
    with suppress(UsageError, IndexError):
        return read_starts(run)[-1]
    return {}
