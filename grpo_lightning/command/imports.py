"""Why a class of the user's cannot be taken, in one phrase."""

import inspect
import os
import sysconfig
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of this package."""

STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
"""The folders of Python's own modules."""


def import_mistake(path: str, families: Sequence[type]) -> str:
    """Why `path` names no class of these families.

    Args:
        path: Import path, such as `my_method.MaxRL`.
        families: The base classes that are allowed.
    """
    module, _, name = path.rpartition(".")
    wanted = " or ".join(family.__name__ for family in families)
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return f"there is no module {error.name} here ({Path.cwd()}) or installed. Give FILE.CLASS, without .py"
        return f"{failure(module, error)}. Install it"
    except Exception as error:  # A module may raise what it likes.
        return failure(module, error)
    if not hasattr(found, name):
        classes = [key for key, value in vars(found).items() if inspect.isclass(value)]
        close = get_close_matches(name, classes, 1, 0.5)
        return f"{origin(found)} has no {name}.{f' Did you mean {module}.{close[0]}?' if close else ''}"
    return f"this is no {wanted}: derive it from {wanted}, and give a class"


def failure(module: str, error: BaseException) -> str:
    """Where the import of `module` failed, and how: `stops.py, line 2: ZeroDivisionError: division by zero`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"importing {module} failed: {told(error, error.filename, error.lineno, error.msg)}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"importing {module} failed: {told(error, frames[-1].filename, frames[-1].lineno, str(error))}"


def told(error: BaseException, file: str, line: int | None, text: str) -> str:
    """An exception with its file and line: `stops.py, line 2: ZeroDivisionError: division by zero`."""
    return f"{Path(file).name}, line {line}: {type(error).__name__}: {next(iter(text.splitlines()), '')}"


def refusal(error: BaseException) -> str:
    """The message of `error`; with file and line where code of the user's raised it.

    Libraries check the arguments that they are given, so a message of theirs stands alone unless the user's code
    called them. An exception of this package that is no UsageError is a bug as well.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename) and not frame.filename.startswith(PACKAGE)]
    if frames and frames[-1].filename.startswith(PACKAGE):
        own = own or [frames[-1]]
    return told(error, own[-1].filename, own[-1].lineno, str(error)) if own else str(error)


def is_library(file: str) -> bool:
    """Whether a file is one of Python's own or of an installed library."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts) or file.startswith(("<", *STANDARD))


def origin(module: object) -> str:
    """A module's file, if it has one of its own, or its name."""
    path = Path(getattr(module, "__file__", None) or "__init__.py")
    return str(getattr(module, "__name__", path)) if path.name == "__init__.py" else path.name
