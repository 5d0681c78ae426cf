"""Sympy's word on two formulas that have a value at too few points to compare there."""

from typing import Any

from grpo_lightning.rewards.verifier.grammar import Node

_FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"},
}
"""Their names in sympy."""


class NotSymbolic(ValueError):
    """The tree has a part that sympy is not asked about."""


def identical(gold: Node, answer: Node) -> bool:
    """Whether the difference cancels to 0. A tree is turned into sympy's, never a text."""
    import sympy

    try:
        difference = sympy.expand(to_sympy(gold)) - sympy.expand(to_sympy(answer))
        return sympy.cancel(sympy.together(difference)) == 0
    except (NotSymbolic, sympy.PolynomialError, NotImplementedError):
        return False


def to_sympy(tree: Node) -> Any:
    """The tree as a sympy expression with real variables.

    Raises:
        NotSymbolic: It has a part without a counterpart here.
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
