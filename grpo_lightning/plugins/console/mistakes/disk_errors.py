"""The message of a disk that refuses to write a file of a run."""

import errno
import os
import re
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""The disk refuses."""

FORBIDDEN = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
"""The folder refuses. An error of these kinds may also come from reading elsewhere."""


def refusal(error: BaseException | None, folder: Path) -> str | None:
    """Returns the disk's message if `error` was caused by a file of `folder` that could not be written, else None.

    torch and TensorBoard wrap the error of the system, so the whole chain of `error` is searched.
    """
    text = None
    # A bound, since causes and contexts together may make a circle: a thread keeps its error, and raises it again.
    for _ in range(100):
        if error is None:
            break
        # Libraries in Rust, such as safetensors, put the error of the system into their message alone.
        number = re.search(r"\(os error (\d+)\)", str(error))
        system = OSError(int(number[1]), os.strerror(int(number[1]))) if number else error
        error = error.__cause__ or error.__context__
        if not isinstance(system, OSError):
            continue
        is_refusal = system.errno in FULL
        if system.errno in FORBIDDEN and isinstance(system.filename, str):
            file = Path(system.filename).absolute()
            run_folder = folder.absolute()
            # Perhaps the folder cannot be made, under a file for instance.
            is_refusal = run_folder in (file, *file.parents) or file in run_folder.parents
        if is_refusal:
            text = f"{system.strerror or system}{f' ({system.filename})' if system.filename else ''}"
    return text
