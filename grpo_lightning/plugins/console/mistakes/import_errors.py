"""Why a class of the user's cannot be taken, in one phrase."""

import inspect
import os
import sysconfig
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from jsonargparse.typing import import_object

from grpo_lightning.plugins.console.mistakes.message_internals import left_by
from grpo_lightning.types import UsageError

PACKAGE = f"{Path(__file__).parents[3]}{os.sep}"
LIBRARIES = ("<", PACKAGE, *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")))
"""How files begin that are not the user's; beside them those in `site-packages` or `dist-packages`."""


def refused_import(error: BaseException) -> UsageError | None:
    """The mistake behind an exception of a module that jsonargparse was importing; None if it was importing none."""
    paths = left_by(error, "import_object", "name")
    return UsageError(f"{paths[-1]}: {import_mistake(paths[-1], [])}") if paths else None


def import_mistake(path: str, families: Sequence[type]) -> str:
    """Why `path`, such as `my_method.MaxRL`, names no class of these families."""
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
        file = Path(getattr(found, "__file__", None) or "__init__.py").name
        origin = found.__name__ if file == "__init__.py" else file
        return f"{origin} has no {name}.{f' Did you mean {module}.{close[0]}?' if close else ''}"
    return f"this is no {wanted}: derive it from {wanted}, and give a class"


def of_function(value: Any) -> Any:
    """The options of a reward; of the import path of a function those of a `FunctionReward` with that function."""
    path = value.get("class_path") if isinstance(value, dict) else value
    if not isinstance(path, str):
        return value
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if not module or not name.isidentifier():
        return value
    if not module.endswith(".py"):
        try:
            function = import_object(f"{module}.{name}")
        except (ImportError, AttributeError, ValueError):
            return value
        if inspect.isclass(function) or not callable(function):
            return value
    arguments = value.get("init_args") if isinstance(value, dict) else None
    return {"class_path": "grpo_lightning.FunctionReward", "init_args": {"function": path, **dict(arguments or {})}}


def failure(module: str, error: BaseException) -> str:
    """Where the import of `module` failed, and how."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"importing {module} failed: {told(error, error.filename, error.lineno, error.msg)}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"importing {module} failed: {told(error, frames[-1].filename, frames[-1].lineno, str(error))}"


def told(error: BaseException, file: str, line: int | None, text: str) -> str:
    """An exception with its file and line: `stops.py, line 2: ZeroDivisionError: division by zero`."""
    return f"{Path(file).name}, line {line}: {type(error).__name__}: {next(iter(text.splitlines()), '')}"


def refusal(error: BaseException) -> str:
    """The message of `error`; with file and line where code of the user's raised it.

    Libraries check the arguments that they are given, so a message of one stands alone unless the user's code
    called them. An exception of this package that is no UsageError is a bug as well.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES) and "-packages/" not in frame.filename]
    if frames and frames[-1].filename.startswith(PACKAGE):
        own = own or [frames[-1]]
    return told(error, own[-1].filename, own[-1].lineno, str(error)) if own else str(error)
