"""The scripts under tools/ and examples/ as modules."""

import importlib.util
from types import ModuleType

from helpers.paths import ROOT


def load_tool(name: str) -> ModuleType:
    """`tools/<name>.py`, which lies outside any package."""
    return _load("tools", name)


def load_example(name: str) -> ModuleType:
    """`examples/<name>.py`, likewise."""
    return _load("examples", name)


def _load(folder: str, name: str) -> ModuleType:
    path = ROOT / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
