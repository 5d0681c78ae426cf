"""Every regular expression and every rewriting of the verifier carries examples, and each example holds."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

from grpo_lightning.plugins import verifier
from grpo_lightning.plugins.verifier.rules import EXAMPLES, Rewriting, rewriting, rule

PACKAGE = Path(verifier.__file__).parent
REWARDS = {"control", "reasoning_gym"}
"""Rewards that use the verifier."""
MODULES = sorted({info.name for info in iter_modules([str(PACKAGE)])} - REWARDS)


def rules_in(value: Any, name: str) -> Iterator[tuple[str, re.Pattern[str] | Rewriting]]:
    """The patterns and rewritings in a module's value, also in a list, a tuple or a dict of them."""
    if isinstance(value, re.Pattern | Rewriting):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from rules_in(part, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from rules_in(part, f"{name}[{index}]")


RULES = {
    f"{module}.{path}": found
    for module in MODULES
    for name, value in vars(importlib.import_module(f"{verifier.__name__}.{module}")).items()
    if name != "EXAMPLES"
    for path, found in rules_in(value, name)
}


def check_pattern(pattern: re.Pattern[str], examples: tuple[str, ...]) -> None:
    """Asserts that there is a marked example, and that matches are exactly what is marked."""
    assert any("«" in example for example in examples), f"{pattern.pattern} has no example that it matches"
    for example in examples:
        text = example.replace("«", "").replace("»", "")
        if example == f"«{text}»" and pattern.fullmatch(text):
            continue
        found, end = "", 0
        for match in pattern.finditer(text):
            found += f"{text[end : match.start()]}«{match[0]}»"
            end = match.end()
        assert found + text[end:] == example


def check_rewriting(found: Rewriting) -> None:
    """Asserts that there is an example that changes, and that each becomes what it says."""
    pairs = [example.split(" -> ") for example in found.examples]
    assert any(before != after for before, after in pairs), f"{found.pattern.pattern} has no example that it changes"
    for before, after in pairs:
        assert found(before) == after


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_examples_of_a_rule_hold(name: str) -> None:
    found = RULES[name]
    if isinstance(found, Rewriting):
        check_rewriting(found)
    else:
        check_pattern(found, EXAMPLES.get(found, ()))


def test_rules_are_found() -> None:
    assert {"extraction._BECAUSE", "question._CHOICE", "tokens._SCRIPTS"} <= RULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_no_regular_expression_is_hidden_from_this_test(module: str) -> None:
    """Only `rules` calls `re`, and `rule` and `rewriting` are called at module level only."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    inside = {id(node) for body in bodies for node in ast.walk(body)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        assert not name.startswith("re.") or module == "rules", f"line {call.lineno}: {name}"
        assert name not in ("rule", "rewriting") or id(call) not in inside, f"line {call.lineno}: {name}"
    imports = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "re" not in imports


@pytest.mark.parametrize(
    "examples", [(), ("none",), ("«1»2",), ("12",), ("«12» or 13",), ("«12 or 13»",), ("«12»", "x12")]
)
def test_a_pattern_without_an_example_or_with_a_false_one_is_noticed(examples: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        check_pattern(re.compile(r"\d+"), examples)


@pytest.mark.parametrize("examples", [(), ("a -> a",), ("a  b -> a  b",), ("a  b -> ab",)])
def test_a_rewriting_without_an_example_or_with_a_false_one_is_noticed(examples: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        check_rewriting(rewriting(r"\s+", " ", *examples))


def test_a_rule_is_its_compiled_pattern() -> None:
    assert rule("[a-z]", "«a»", flags=re.IGNORECASE) is re.compile("[a-z]", re.IGNORECASE)
