"""Files that are written whole or not at all, and one that may not be whole."""

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""The end of the name of a file that is not whole yet, or never will be, since its program was killed."""


class DiskFailure(Exception):
    """A file of the run could not be written."""


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which is then renamed to `path`: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def is_trial(trainer: Any) -> bool:
    """Returns True if this run is a trial (`trainer.fast_dev_run`), which must write nothing."""
    return bool(getattr(trainer, "fast_dev_run", False))


def write_whole(path: Path, text: str) -> None:
    """Writes `text` whole or not at all. A lone surrogate becomes its escape, as JSON has it."""
    with beside(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def whole_files(folder: Path, pattern: str) -> list[Path]:
    """Returns the files in a folder whose names match, sorted, without folders and files that are not whole."""
    return sorted(path for path in folder.glob(pattern) if path.suffix != PARTIAL and path.is_file())


def table(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSVLogger's file without empty cells and without a half-written row; [] without a file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{name: value for name, value in row.items() if value} for row in rows]
