"""pyproject.toml, constraints.txt, CITATION.cff, CHANGELOG.md and the hooks agree, and promise what there is."""

import re
import sys
import tomllib
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import yaml
from helpers.paths import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: [Requirement(one) for one in some] for name, some in PROJECT["optional-dependencies"].items()}
REQUIRED = [Requirement(one) for one in PROJECT["dependencies"]]
TESTED = {
    name.lower().replace("_", "-"): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}
USED_BY = {
    "docs": ["mkdocs.yml", "tools"],
    "dev": ["Makefile", "tests", "tools"],
    "bench": ["experiments", "tools"],
    "smollm2": ["tools"],
    "openenv": ["examples", "tests"],
}
"""Files and folders that name an extra's packages; elsewhere the package itself does."""
TRACES = {"pytest-xdist": "-n $(JOBS)", "mkdocs-material": "name: material"}
"""What shows that a package is used, where that is not its name."""


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    heading = re.search(r"^## \[(.+?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading is not None
    assert citation["version"] == version == heading[1]
    assert str(citation["date-released"]) == heading[2]


@pytest.mark.parametrize("requirement", REQUIRED, ids=lambda one: one.name)
def test_a_dependency_has_both_bounds_around_the_tested_version(requirement: Requirement) -> None:
    assert {one.operator for one in requirement.specifier} == {">=", "<"}
    assert requirement.specifier.contains(TESTED[requirement.name])


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_used(extra: str) -> None:
    """No extra promises what no code uses."""
    files = [
        file for name in USED_BY.get(extra, ["grpo_lightning"]) for file in [ROOT / name, *ROOT.glob(f"{name}/**/*.py")]
    ]
    own = ROOT / "tests" / "test_project.py"
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file() and file != own)
    for requirement in EXTRAS[extra]:
        trace = TRACES.get(requirement.name, requirement.name)
        assert trace in text or trace.replace("-", "_") in text, requirement.name


def test_the_hook_runs_the_tested_ruff() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["rev"] == f"v{TESTED['ruff']}"


@pytest.mark.parametrize("folder", ["tests/helpers", "tools", "docs/figures"])
def test_no_script_hides_a_library(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's folder comes first where Python looks for modules: a tokenizers.py there hides the library."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path) != ROOT / folder])
    names = [path.stem for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]
    # PathFinder looks at folders alone; find_spec would answer with what another test has imported.
    assert [
        name for name in names if (found := PathFinder.find_spec(name)) is not None and found.origin is not None
    ] == []
