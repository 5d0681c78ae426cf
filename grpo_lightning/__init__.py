"""GRPO and its relatives on PyTorch Lightning: every axis one class and one line of YAML.

Every public name is here: `grpo_lightning.GroupStd`. Its file is read when the name is first used, so importing the
package imports neither torch nor Lightning. The names and their files are listed in `__init__.pyi`.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_FILES = {
    str(alias.asname): str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module != __name__
    for alias in node.names
}

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    """A public name, from its file, or a folder."""
    if name == "__version__":
        from importlib.metadata import version  # brings a parser of e-mail along

        return version("grpo-lightning")
    if name == "inspect":
        return import_module(f"{__name__}.plugins.looking.inspector")
    if name not in _FILES:
        from grpo_lightning.command.overview import RENAMES, ask

        if (new_name := ask(f"{RENAMES}:new_class", name) or name) != name:
            return __getattr__(new_name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_FILES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
