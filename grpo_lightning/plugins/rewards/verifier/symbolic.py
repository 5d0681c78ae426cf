"""Decides by sympy whether two formulas are equal, where they have values at too few points to compare."""

from operator import neg, truediv
from typing import Any

from grpo_lightning.plugins.rewards.verifier.grammar import Node
from grpo_lightning.plugins.rewards.verifier.words import spellings, word_set

_SYMPY_NAMES = {
    **{name: name for name in word_set("sin cos tan cot sec csc sinh cosh tanh")},
    **spellings("log ln; asin arcsin; acos arccos; atan arctan"),
}
"""The functions of the grammar by their names in sympy."""


class NotSymbolic(ValueError):
    """The tree has a node without a counterpart in sympy."""


def identical(gold: Node, answer: Node) -> bool:
    """Tells whether the difference of two formulas cancels to 0. Sympy gets a tree, never a text."""
    import sympy  # takes half a second, which most answers need not wait for

    try:
        difference = sympy.expand(to_sympy(gold)) - sympy.expand(to_sympy(answer))
        return bool(sympy.cancel(sympy.together(difference)) == 0)
    except (NotSymbolic, sympy.PolynomialError, NotImplementedError):
        return False


def to_sympy(tree: Node) -> Any:
    """Returns the tree as a sympy expression with real variables. Raises NotSymbolic for other kinds of nodes."""
    import sympy

    kind, *children = tree
    if kind == "number":
        return sympy.Rational(children[0].numerator, children[0].denominator)
    if kind == "symbol":
        return sympy.Symbol(children[0], real=True)
    if kind == "constant" and children[0] in ("pi", "e", "i"):
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}[children[0]]
    if kind == "call" and len(children) == 2 and children[0] in _SYMPY_NAMES:
        return getattr(sympy, _SYMPY_NAMES[children[0]])(to_sympy(children[1]))
    makers = {"add": sympy.Add, "mul": sympy.Mul, "abs": sympy.Abs, "pow": sympy.Pow, "div": truediv, "neg": neg}
    makers["root"] = lambda degree, base: sympy.Pow(base, 1 / degree)
    if kind not in makers:
        raise NotSymbolic(kind)
    return makers[kind](*map(to_sympy, children))
