"""The options and classes that there are, read from the sources: importing them with torch would take seconds."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import grpo_lightning
from grpo_lightning.command.overview import SECTIONS, SEEDED

CONTAINERS = {"None", "list", "Sequence", "tuple"}

PLAIN = {*CONTAINERS, "str", "int", "float", "bool", "dict", "Any", "Literal"}
"""Names in annotations that stand for no class."""

ROOTS = {"ABC", "Module", "Protocol"}
"""Bases outside the package whose constructors take no options."""

ALSO = ["model.optimizer.lr", "model.optimizer.weight_decay"]
"""Arguments of the default optimizer, which is torch's."""

FILES: dict[str, str] = vars(grpo_lightning)["_FILES"]
"""Public name -> its module."""

TRAINER = "lightning.pytorch.trainer.trainer.Trainer"


class Option(NamedTuple):
    """What an option takes, as far as its annotation tells."""

    family: str = ""
    """Import path of the class whose members it takes; empty if they are not of this package."""
    open: bool = False
    """Something else too: text, or classes of others."""
    default: str = ""
    """The class where none is given; empty if that is not known."""
    flat: bool = False
    """Its arguments are options by themselves: `model.policy.path`."""


Options = Mapping[str, Option]


@cache
def body(module: str) -> list[ast.stmt]:
    """The statements of a module of this package, or of Lightning, which is not imported; none if it is not there."""
    package, *parts = module.split(".")
    spec = find_spec(package)
    path = Path(str(spec.origin if spec else "")).parent.joinpath(*parts)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []


@cache
def find(name: str, module: str = "") -> str:
    """The import path of the class that `name` means in a module, or in this package; empty if it is none of these."""
    module = module or FILES.get(name, "")
    for node in body(module) if module.startswith("grpo_lightning.") else []:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return f"{module}.{name}"
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return find(name, str(node.module))
    return ""


UNKNOWN = ast.ClassDef("", [ast.Name("unknown")], [], [], [])
"""Stands for a class that is not where it was: its arguments are not known."""


@cache
def definition(path: str) -> ast.ClassDef:
    """The source of a class."""
    module, _, name = path.rpartition(".")
    return next((node for node in body(module) if isinstance(node, ast.ClassDef) and node.name == name), UNKNOWN)


@cache
def bases(path: str) -> dict[str, str]:
    """The bases of a class by their names, with their import paths, which are empty outside of this package."""
    names = [re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2] for base in definition(path).bases]
    return {name: find(name, path.rpartition(".")[0]) for name in names}


def derives(path: str, family: str) -> bool:
    """True for `family` and the classes that derive from it."""
    return path == family or any(derives(base, family) for base in bases(path).values() if base)


def is_abstract(path: str) -> bool:
    """True for a class that cannot be made, as its base says."""
    return not {"ABC", "Protocol"}.isdisjoint(bases(path))


@cache
def members(family: str) -> list[str]:
    """The public classes that derive from `family` and can be made, by their import paths; or `family` alone."""
    paths = [path for path in map(find, grpo_lightning.__all__) if path and path != family]
    return [path for path in paths if derives(path, family) and not is_abstract(path)] or [family]


@cache
def arguments(path: str, method: str = "__init__") -> Options | None:
    """The arguments of a class, or of a method of it; None if they cannot be told."""
    node, module = definition(path), path.rpartition(".")[0]
    for made in (made for made in node.body if isinstance(made, ast.FunctionDef) and made.name == method):
        args = made.args
        names, values = args.args[1:] + args.kwonlyargs, args.defaults + args.kw_defaults
        given = zip(names, [None] * (len(names) - len(values)) + values, strict=True)
        return None if args.kwarg else {arg.arg: option(arg.annotation, value, module) for arg, value in given}
    found: dict[str, Option] = {}
    for name, base in bases(path).items():
        inherited = arguments(base) if base else {} if name in ROOTS else None
        if inherited is None:
            return None
        found = {**inherited, **found}
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign) and has(node, "dataclass")]
    fields = [field for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    return found | {ast.unparse(field.target): option(field.annotation, field.value, module) for field in fields}


def has(node: ast.ClassDef, *decorators: str) -> bool:
    """True for a class with one of these decorators."""
    return any(re.split(r"\W", ast.unparse(decorator))[0] in decorators for decorator in node.decorator_list)


def option(annotation: ast.expr | None, default: ast.expr | None, module: str) -> Option:
    """What an argument with this annotation takes."""
    nodes = [*ast.walk(annotation)] if annotation else []
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - CONTAINERS
    own = {name: path for name in names if (path := find(name, module))}
    if len(own) != 1 or not names.isdisjoint({"Callable", "dict"}):
        return Option(open=not names <= PLAIN)
    ((name, path),) = own.items()
    # HasSpread(), default_factory=HasSpread
    made = re.search(r"(\w+)\(?\)$", ast.unparse(default)) if default else None
    first = (find(made[1], module) if made else "") or ("" if is_abstract(path) else path)
    flat = isinstance(annotation, ast.Name) and has(definition(path), "final", "dataclass")
    return Option(path, names != {name}, first, flat)


@cache
def sections(command: str) -> Options:
    """The options of a command: its sections, and those that are in none."""
    found = {"model": find("GRPOModule"), "data": find("PromptDataModule")}
    found |= {name: find(kind) for name, kind in SECTIONS.items()}
    found["trainer"] = TRAINER
    runs = ("grpo_lightning.plugins.planning.report.Planner" if command == "plan" else TRAINER, command)
    taken = re.compile("model|datamodule|.*dataloaders")
    runs_own = [name for name in arguments(*runs) or () if not taken.fullmatch(name)]
    alone = dict.fromkeys(["config", "print_config", "seed_everything", *runs_own], Option())
    return {name: Option(path, flat=True, default=path) for name, path in found.items()} | alone


@cache
def names_of(command: str) -> list[str]:
    """The keys of a command's options, and behind them those of the arguments of the classes that they take."""
    hidden = {*SEEDED, "config", "print_config"}
    found: list[list[str]] = [[], [*ALSO], [], []]

    def walk(options: Options, prefix: str, depth: int) -> None:
        for key, option in ((f"{prefix}{name}", option) for name, option in options.items()):
            if option.flat:
                walk(arguments(option.family) or {}, f"{key}.", depth)
                continue
            found[depth].append(key)
            for path in [option.family, *members(option.family)] if option.family and depth < 3 else []:
                walk(arguments(path) or {}, f"{key}.", max(depth, 1) + 1)

    walk(sections(command), "", 0)
    return [key for key in dict.fromkeys(key for keys in found for key in keys) if key not in hidden]
