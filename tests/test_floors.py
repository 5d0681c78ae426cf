"""A folder is a floor: a file imports only from its own folder, or from folders before it in the list.

Above the core stand the plugins, folders that can each be deleted: nothing in the core imports them.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from helpers.paths import ROOT

PACKAGE = ROOT / "grpo_lightning"

FLOORS = [
    "types ranks packaged disk",
    "maths",
    "sandbox",
    "tasks",
    "policy",
    "rewards",
    "engines",
    "grpo",
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


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name: str) -> None:
    own = FLOOR_OF[name.split(".")[0]]
    assert [other for other in imports_of(MODULES[name]) if FLOOR_OF[other.split(".")[0]] > own] == []


def test_the_tests_of_the_core_import_no_plugin() -> None:
    core = {name for name in FLOOR_OF if name != "plugins" and (PACKAGE / name).is_dir()}
    for path in (path for name in core for path in (ROOT / "tests" / name).glob("*.py")):
        assert [name for name in imports_of(path) if name.startswith("plugins")] == [], path


DISTRICTS = "rewards methods sources data engines compute console looking"

PLUGINS: dict[str, set[str]] = {
    "compute.planning": {"compute.fast", "engines.native", "methods.distillation"},
    "console.display": {"looking.inspector", "looking.loggers", "looking.run_files"},
    "console.start": {"looking.run_files"},
    "console.sweep": {"looking.report"},
    "data.benchmarks": {"looking.run_files"},
    "data.conversations": {"data.benchmarks", "data.images"},
    "engines.native": {"compute.fast"},
    "engines.vllm": {"engines.http", "engines.native"},
    "looking.export": {"console.mistakes", "looking.run_files"},
    "looking.inspector": {"data.images", "looking.pages", "looking.run_files"},
    "looking.loggers": {"looking.run_files"},
    "looking.run_files": {"console.mistakes"},
    "looking.report": {"looking.inspector", "looking.pages", "looking.run_files"},
    "rewards.judge": {"engines.http"},
    "rewards.process": {"rewards.learned"},
    "rewards.reasoning_gym": {"rewards.verifier"},
}
"""The other plugin folders that a plugin folder may import."""


def folder_of(module: str) -> str:
    """The folder of a plugin: `district.folder`."""
    return ".".join(module.split(".")[1:3])


def test_every_plugin_stands_in_a_district() -> None:
    folders = [path for path in (PACKAGE / "plugins").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {path.name for path in folders} == {*DISTRICTS.split()}
    assert [path for folder in folders for path in folder.glob("*.py") if path.name != "__init__.py"] == []


def test_plugins_know_few_other_plugins() -> None:
    imported_by: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name.startswith("plugins."):
            folder = folder_of(name)
            others = {folder_of(other) for other in imports_of(path) if other.startswith("plugins.")}
            imported_by.setdefault(folder, set()).update(others - {folder})
    assert {folder: others for folder, others in imported_by.items() if others} == PLUGINS


def test_no_two_files_have_one_name() -> None:
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(name for name in {*names} if names.count(name) > 1) == []


def test_no_two_classes_have_one_name() -> None:
    names = [node.name for _, node in NODES if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert sorted(name for name in {*names} if names.count(name) > 1) == []


def test_nothing_in_training_knows_its_callbacks() -> None:
    callbacks = "training.callbacks"
    below = [name for name in MODULES if name.startswith("training.") and not name.startswith(callbacks)]
    assert [name for name in below if any(other.startswith(callbacks) for other in imports_of(MODULES[name]))] == []


READING_PATH = [*(f"grpo/{name}.py" for name in ("loop", "source", "explore", "prepare", "update", "step"))]
READING_PATH += ["maths/rollouts.py", "maths/objective.py"]
"""What the README leads to after examples/one_step.py."""


def num_tokens(text: str) -> int:
    """Names, operators, numbers and strings; docstrings, comments and blank lines cost nothing."""
    counted = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.string.lstrip("rRbBuU").startswith('"""')
        count += token.type in counted or (token.type == tokenize.STRING and not is_docstring)
    return count


def tokens_of_files(paths: Iterable[Path]) -> int:
    return sum(num_tokens(path.read_text(encoding="utf-8")) for path in paths)


def test_a_token_is_what_a_reader_reads() -> None:
    packed = "a, b = 1, f(x)"
    explained = '"""A docstring."""\n\n# Why so.\na = 1\n\n# And so.\nb = f(x)\n'
    assert num_tokens(packed) == 10  # a , b = 1 , f ( x )
    assert num_tokens(explained) == 9  # a = 1 b = f ( x )


one_token_per_string = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the limits are of tokens of Python 3.11, where an f-string is one"
)


@one_token_per_string
def test_the_reading_path_is_short() -> None:
    assert {f"grpo/{path.name}" for path in (PACKAGE / "grpo").glob("[a-z]*.py")} <= {*READING_PATH}
    assert tokens_of_files(PACKAGE / name for name in READING_PATH) <= 7_400


CORE = {name: path for name, path in MODULES.items() if not name.startswith("plugins")}


@one_token_per_string
def test_the_core_stays_small() -> None:
    """A feature that enters makes something else needless."""
    assert tokens_of_files(CORE.values()) <= 69_500


@one_token_per_string
def test_package_and_tests_stay_small() -> None:
    assert tokens_of_files(PACKAGE.rglob("*.py")) <= 245_500
    assert tokens_of_files((ROOT / "tests").rglob("*.py")) <= 317_500


MOST_POINTING = 1  # per 1,000 bindings; it may only become smaller
MOST_UNRELATED = 0  # in the package

POINTING = (
    "found own one given there told both every everyone each more others other asked made seen rest some known kept "
    "whole here now then drawn taken wanted missing talk part place where when which why fix ended asking going mine "
    "its late after before most least of into such same thing things"
)
"""Names that point at a thing instead of saying what it is."""

NODES = [(path, node) for path in MODULES.values() for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def bound_name(node: ast.AST) -> str:
    """The name that a node binds: a variable, an attribute or an argument; empty if none."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return node.arg if isinstance(node, ast.arg) and node.arg not in ("self", "cls") else ""


def test_a_name_says_what_it_holds() -> None:
    names = [bound_name(node).lstrip("_") for _, node in NODES if bound_name(node)]
    assert sum(name in POINTING.split() for name in names) <= MOST_POINTING * len(names) / 1000


def test_one_statement_does_one_thing() -> None:
    unrelated = [
        (path.name, node.lineno)
        for path, node in NODES
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        if len(node.value.elts) >= 3 or any(isinstance(inner, ast.Call) for inner in ast.walk(node.value))
    ]
    assert len(unrelated) <= MOST_UNRELATED, unrelated


def test_public_attributes_have_docstrings() -> None:
    """A docstring stands on the line after the attribute, where tools find it."""
    silent = [
        f"{path.name}: {node.name}.{item.target.id}"
        for path, node in NODES
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for item, following in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
        if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant))
    ]
    assert silent == []


def test_a_function_has_at_most_forty_statements() -> None:
    functions = [(path, node) for path, node in NODES if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {
        f"{path.name}: {node.name}": sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
        for path, node in functions
    }
    assert {name: size for name, size in sizes.items() if size > 40} == {}


def test_no_class_of_the_core_takes_more_than_twelve_arguments() -> None:
    for name, path in CORE.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                assert len(node.args.args) + len(node.args.kwonlyargs) - 1 <= 12, name


def test_below_the_loop_algorithm_1_needs_no_lightning() -> None:
    below = [path for path in (PACKAGE / "grpo").glob("*.py") if path.name != "loop.py"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in below}
    assert [name for name, text in texts.items() if re.search(r"^(import|from) lightning\b", text, re.MULTILINE)] == []


def test_no_circle() -> None:
    left = {name: {*imports_of(path)} - {name} for name, path in MODULES.items()}
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"a circle among {sorted(left)}"


def test_nothing_of_the_package_is_imported_inside_a_sandbox_process() -> None:
    inside = [PACKAGE / "sandbox" / "main.py", *PACKAGE.rglob("inside/*.py")]
    assert [path.name for path in inside if [*imports_of(path)]] == []


ARCHITECTURE = (ROOT / "docs" / "explanation" / "one_step.md").read_text(encoding="utf-8")


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
