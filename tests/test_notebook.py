"""docs/notebooks/quickstart.ipynb runs as it is written; ipykernel runs it."""

from pathlib import Path

import nbformat
import pytest
from helpers.paths import ROOT
from nbclient import NotebookClient


@pytest.mark.whole
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "docs/notebooks/quickstart.ipynb", 4)
    NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
