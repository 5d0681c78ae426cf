"""Reads the range of an option from the check that refuses other values.

The checks are calls of `require` and `at_least`. Their messages say the range: `KEY=...: give RANGE`.
"""

import ast
import inspect
import re
from functools import cache
from types import ModuleType

ADVICE = re.compile(r"; .*|, e\.g\. .*|, such as .*|, or (?:take|leave) .*| \([^()]*\)")
"""What is not the range in a message."""


def ranges_of(kind: type) -> dict[str, str]:
    """Returns the ranges of a class's arguments, by name; arguments without a check are left out."""
    ranges: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        module = inspect.getmodule(base)
        if module is not None and module.__name__.startswith("grpo_lightning"):
            in_functions, in_classes = ranges_in(module)
            ranges |= in_functions | in_classes.get(base.__name__, {})
    names = {*inspect.signature(kind).parameters}
    return {name: text for name, text in ranges.items() if name in names}


@cache
def ranges_in(module: ModuleType) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Returns the ranges that the functions of a module check, and those that each of its classes checks."""
    tree = ast.parse(inspect.getsource(module))
    in_classes = {node.name: checks_in(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    in_functions = [checks_in(node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {name: text for checks in in_functions for name, text in checks.items()}, in_classes


def checks_in(tree: ast.AST) -> dict[str, str]:
    """Returns the ranges that a part of a file checks, by the name of the argument."""
    ranges: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            ranges |= checks_in_loop(node)
        elif isinstance(node, ast.Call):
            ranges |= check_of(node)
    return ranges


def check_of(call: ast.Call) -> dict[str, str]:
    """Returns the range of a single check; empty if the call is no check, or if its range cannot be read."""
    function = ast.unparse(call.func)
    if function == "at_least" and isinstance(call.args[0], ast.Constant) and isinstance(call.args[2], ast.Constant):
        name = str(call.args[0].value).rpartition(".")[2]
        return {name: f"{ast.unparse(call.args[2])} or more"}
    if function == "require":
        message = ast.unparse(call.args[1])
        match = re.search(r"give (?:a (?=finite)|a number (?!of))?([^{}]*)['\"]$", message)
        names = re.findall(r"([\w.]+)=\{", message)
        if match and match[1] != "a range":
            range_text = ADVICE.sub("", match[1]).removesuffix(" number")
            return {name.rpartition(".")[2]: range_text for name in names}
    return {}


def checks_in_loop(loop: ast.For) -> dict[str, str]:
    """Returns the ranges that a loop over names checks: `for name in ("mu", ...): at_least(f"loop.{name}", ..., 1)`."""
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and ast.unparse(node.func) == "at_least"]
    if not calls or not isinstance(loop.iter, ast.Tuple):
        return {}
    rows = ast.literal_eval(loop.iter)
    minimum = calls[0].args[2]
    if isinstance(minimum, ast.Constant):
        return dict.fromkeys(rows, f"{ast.unparse(minimum)} or more")
    return {name: f"{least} or more" for name, least in rows}
