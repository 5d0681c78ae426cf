"""Files that are written whole or not at all, and the message when the disk refuses."""

import csv
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""The disk itself refuses."""

FORBIDDEN = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
"""The folder refuses. An error of these kinds may also come from reading elsewhere."""


class DiskFailure(Exception):
    """A file of the run could not be written."""


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A path to write to, which is then renamed to `path`: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def is_trial(trainer: Any) -> bool:
    """Whether this run is a trial (`trainer.fast_dev_run`), which must write nothing."""
    return bool(getattr(trainer, "fast_dev_run", False))


def settle(path: Path) -> None:
    """Waits until a file is on the disk, and gives it the permissions of a file that `open` makes."""
    if path.is_file():
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def write_whole(path: Path, text: str) -> None:
    """Writes `text` whole or not at all. A lone surrogate becomes its escape, as JSON has it."""
    with beside(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSVLogger's file without empty cells and without one that is half written; none without a file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{name: value for name, value in row.items() if value} for row in rows]


def refusal(error: BaseException | None, folder: Path) -> str | None:
    """The message of the disk, if `error` was caused by a file that could not be written; None for any other error.

    Args:
        error: An exception. torch and TensorBoard wrap the error of the system, so its whole chain is searched.
        folder: The folder that the run writes to.
    """
    seen: set[int] = set()
    found: OSError | None = None
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        system = error if isinstance(error, OSError) else _inside(error)
        if system is not None and _concerns(system, folder):
            found = system
        error = error.__cause__ or error.__context__
    if found is None:
        return None
    where = f" ({found.filename})" if found.filename else ""
    return f"{found.strerror or found}{where}"


def _inside(error: BaseException) -> OSError | None:
    """The error of the system that a library in Rust, such as safetensors, tells in its message alone."""
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return OSError(int(found[1]), os.strerror(int(found[1])))
    return None


def _concerns(error: OSError, folder: Path) -> bool:
    if error.errno in FULL:
        return True
    if error.errno not in FORBIDDEN or not isinstance(error.filename, str):
        return False
    file, folder = Path(error.filename).absolute(), folder.absolute()
    # The folder itself may be what cannot be made, under a file for instance.
    return folder in (file, *file.parents) or file in folder.parents
