"""The modules of an experiment, which find each other as those of a script do."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from helpers.paths import ROOT


@contextmanager
def imported(*folders: str) -> Iterator[SimpleNamespace]:
    """Every module of these folders of `experiments/`, by name; forgotten afterwards.

    Args:
        *folders: Those whose files import each other.
    """
    paths = [ROOT / "experiments" / folder for folder in folders]
    names = [file.stem for path in paths for file in sorted(path.glob("*.py"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*map(str, paths), str(ROOT / "tools"), *sys.path])
        try:
            yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        finally:
            for name in names:
                sys.modules.pop(name, None)
