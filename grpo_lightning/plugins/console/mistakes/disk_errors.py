"""What the disk says when it refuses to write a file of a run."""

import errno
import os
import re
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # the disk itself refuses

FORBIDDEN = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
"""The folder refuses. An error of these kinds may also come from reading elsewhere."""


def refusal(error: BaseException | None, folder: Path) -> str | None:
    """The message of the disk, if `error` was caused by a file of `folder` that could not be written; or None.

    torch and TensorBoard wrap the error of the system, so the whole chain of `error` is searched.
    """
    text = None
    while error is not None:
        # Libraries in Rust, such as safetensors, tell the error of the system in their message alone.
        number = re.search(r"\(os error (\d+)\)", str(error))
        system = OSError(int(number[1]), os.strerror(int(number[1]))) if number else error
        error = error.__cause__ or error.__context__
        if not isinstance(system, OSError):
            continue
        concerns = system.errno in FULL
        if system.errno in FORBIDDEN and isinstance(system.filename, str):
            file, whole = Path(system.filename).absolute(), folder.absolute()
            # The folder itself may be what cannot be made, under a file for instance.
            concerns = whole in (file, *file.parents) or file in whole.parents
        if concerns:
            text = f"{system.strerror or system}{f' ({system.filename})' if system.filename else ''}"
    return text
