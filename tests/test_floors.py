"""A folder is a floor: a file imports only from its own folder, or from folders before it in the list.

Above the core stand the plugins, folders that can each be deleted: nothing in the core imports them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.paths import ROOT

PACKAGE = ROOT / "grpo_lightning"

FLOORS = [
    "types ranks history",
    "maths",
    "sandbox",
    "tasks",
    "policy",
    "rewards",
    "engines",
    "training",
    "command",
    "plugins",
    "cli __main__",
]

FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py"
}


def imports_of(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                module = full.removeprefix("grpo_lightning.")
                yield from {module, module.rpartition(".")[0]} & (MODULES.keys() if full != module else set())
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name.startswith("grpo_lightning."))
            yield from (name.removeprefix("grpo_lightning.") for name in names)


def test_every_file_is_on_a_floor() -> None:
    assert {name.split(".")[0] for name in MODULES} == FLOOR_OF.keys()


OVER_THE_WALL = {
    "policy.policy": {"fast"},
    "training.data": {"conversations"},
    "training.explorer": {"conversations"},
}
"""The imports of plugins that are left in the core. The list may only become shorter."""


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name: str) -> None:
    own = FLOOR_OF[name.split(".")[0]]
    above = {other for other in imports_of(MODULES[name]) if FLOOR_OF[other.split(".")[0]] > own}
    plugins = {other.split(".")[1] for other in above if other.startswith("plugins.")}
    assert plugins == OVER_THE_WALL.get(name, set())
    assert all(other.startswith("plugins") for other in above), f"{name} imports {above}"


PLUGINS = {"process": {"verifier", "learned"}, "planning": {"fast"}, "vllm": {"fast"}}
"""The other plugins that a plugin may import."""


def test_plugins_know_few_other_plugins() -> None:
    known: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name.startswith("plugins."):
            own = name.split(".")[1]
            others = {other.split(".")[1] for other in imports_of(path) if other.startswith("plugins.")}
            known.setdefault(own, set()).update(others - {own})
    assert {own: others for own, others in known.items() if others} == PLUGINS


def test_nothing_in_training_knows_its_callbacks() -> None:
    callbacks = "training.callbacks"
    below = [name for name in MODULES if name.startswith("training.") and not name.startswith(callbacks)]
    assert [name for name in below if any(other.startswith(callbacks) for other in imports_of(MODULES[name]))] == []


def test_preparation_needs_no_lightning() -> None:
    left, seen = ["training.preparation"], set()
    while left:
        name = left.pop()
        seen.add(name)
        left += [other for other in imports_of(MODULES[name]) if other.startswith("training.") and other not in seen]
    texts = [MODULES[name].read_text(encoding="utf-8") for name in seen]
    assert not [text for text in texts if re.search(r"^(import|from) lightning\b", text, re.MULTILINE)]


def test_no_circle() -> None:
    left = {name: {*imports_of(path)} - {name} for name, path in MODULES.items()}
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"a circle among {sorted(left)}"


def test_nothing_of_the_package_is_imported_inside_a_sandbox_process() -> None:
    inside = [PACKAGE / "sandbox" / "main.py", *(PACKAGE / "sandbox" / "inside").glob("*.py")]
    assert [path.name for path in inside if [*imports_of(path)]] == []


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_architecture_names_every_floor() -> None:
    table = ARCHITECTURE[ARCHITECTURE.index("| part of `grpo_lightning/`") :]
    for name in FLOOR_OF.keys() - {"__main__"}:
        kind = "/" if (PACKAGE / name).is_dir() else ".py"
        assert f"`{name}{kind}`" in table, name


def test_the_architecture_names_every_folder() -> None:
    with_files = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("[a-z]*/**/*.*") if path.is_file()}
    ignored = {"site", "runs", "build", "dist"} | {path.name for path in ROOT.glob("*.egg-info")}
    for name in with_files - ignored:
        assert f"`{name}/`" in ARCHITECTURE, name
