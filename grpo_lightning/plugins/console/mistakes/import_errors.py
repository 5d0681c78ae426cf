"""Explains in a phrase why a class in a user's file cannot be imported or used."""

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
"""Beginnings of the paths of files that are not the user's. Files below `site-packages` are not the user's either."""


def refused_import(error: BaseException) -> UsageError | None:
    """Returns the mistake if the exception was raised while jsonargparse imported a class; else None."""
    paths = left_by(error, "import_object", "name")
    return UsageError(f"{paths[-1]}: {import_mistake(paths[-1], [])}") if paths else None


def import_mistake(path: str, families: Sequence[type]) -> str:
    """Returns why `path`, such as `my_method.MaxRL`, is no class that derives from one of `families`."""
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            return f"there is no module {error.name} here ({Path.cwd()}) or installed. Give FILE.CLASS, without .py"
        return f"{failure(module_name, error)}. Install it"
    except Exception as error:  # a module may raise any exception
        return failure(module_name, error)
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        close = get_close_matches(name, classes, 1, 0.5)
        file = Path(getattr(module, "__file__", None) or "__init__.py").name
        origin = module.__name__ if file == "__init__.py" else file
        return f"{origin} has no {name}.{f' Did you mean {module_name}.{close[0]}?' if close else ''}"
    expected = " or ".join(family.__name__ for family in families)
    return f"this is no {expected}: derive it from {expected}, and give a class"


def of_function(value: Any) -> Any:
    """Returns the options of a reward. The import path of a function becomes a `FunctionReward` of that function."""
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
    """Returns where the import of `module` failed, and how."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"importing {module} failed: {located(error, error.filename, error.lineno, error.msg)}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"importing {module} failed: {located(error, frames[-1].filename, frames[-1].lineno, str(error))}"


def located(error: BaseException, file: str, line: int | None, text: str) -> str:
    """Describes an exception with its file and line: `stops.py, line 2: ZeroDivisionError: division by zero`."""
    return f"{Path(file).name}, line {line}: {type(error).__name__}: {next(iter(text.splitlines()), '')}"


def refusal(error: BaseException) -> str:
    """Returns the message of `error`, with file and line if the user's code raised it or called what raised it.

    The message of a library that this package called stands alone, since libraries check their arguments. An exception
    that this package raised itself is a bug, so it gets file and line as well.
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame for frame in frames if not frame.filename.startswith(LIBRARIES) and "-packages/" not in frame.filename
    ]
    if not user_frames and frames and frames[-1].filename.startswith(PACKAGE):
        user_frames = frames
    if not user_frames:
        return str(error)
    return located(error, user_frames[-1].filename, user_frames[-1].lineno, str(error))
