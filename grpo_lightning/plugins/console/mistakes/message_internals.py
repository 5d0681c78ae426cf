"""Private names of jsonargparse that the messages about mistakes rely on, as of jsonargparse 4.53."""

import traceback
from typing import Any


def left_by(error: BaseException, function: str, variable: str) -> list[Any]:
    """Returns the values that a variable had in the calls of a function which `error` has left, outermost first.

    No message says which `name` jsonargparse's `import_object` was importing, and whose `self` an `__init__` made.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == function)
    return [frame.f_locals[variable] for frame in frames if variable in frame.f_locals]
