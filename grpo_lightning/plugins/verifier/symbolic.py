"""Compares two formulas by sympy, if they have a value at too few points."""

from typing import Any

from grpo_lightning.plugins.verifier.grammar import Node

_FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"},
}
"""Names of functions in sympy."""


class NotSymbolic(ValueError):
    """The tree has a part that is not converted to sympy."""


def identical(gold: Node, answer: Node) -> bool:
    """Whether the difference of two formulas cancels to 0. Sympy gets a tree, never a text."""
    import sympy

    try:
        difference = sympy.expand(to_sympy(gold)) - sympy.expand(to_sympy(answer))
        return sympy.cancel(sympy.together(difference)) == 0
    except (NotSymbolic, sympy.PolynomialError, NotImplementedError):
        return False


def to_sympy(tree: Node) -> Any:
    """The tree as a sympy expression with real variables.

    Raises:
        NotSymbolic: A part of the tree has no counterpart.
    """
    import sympy

    kind, *parts = tree
    if kind == "number":
        return sympy.Rational(parts[0].numerator, parts[0].denominator)
    if kind == "symbol":
        return sympy.Symbol(parts[0], real=True)
    if kind == "constant" and parts[0] in ("pi", "e", "i"):
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}[parts[0]]
    if kind == "call" and len(parts) == 2 and parts[0] in _FUNCTIONS:
        return getattr(sympy, _FUNCTIONS[parts[0]])(to_sympy(parts[1]))
    if kind not in ("add", "mul", "div", "neg", "pow", "root", "abs"):
        raise NotSymbolic(kind)
    values = [to_sympy(part) for part in parts]
    if kind == "div":
        return values[0] / values[1]
    if kind == "neg":
        return -values[0]
    if kind == "pow":
        return sympy.Pow(values[0], values[1])
    if kind == "root":
        return sympy.Pow(values[1], 1 / values[0])
    return {"add": sympy.Add, "mul": sympy.Mul, "abs": sympy.Abs}[kind](*values)
