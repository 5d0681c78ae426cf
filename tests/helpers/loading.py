"""The scripts under tools/ as modules."""

import importlib.util
from types import ModuleType

from helpers.paths import ROOT


def load_tool(name: str) -> ModuleType:
    """`tools/<name>.py`, which lies outside any package."""
    path = ROOT / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
