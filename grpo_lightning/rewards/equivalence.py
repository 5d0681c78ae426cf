r"""Whether two short LaTeX answers mean the same, by math-verify. Runs in a worker process, never in ours.

math-verify compares values to so many places after the point, solves equations and turns relations into sets. Here its
`equal` counts only where it is not for want of digits, of solutions or of brackets.
"""

import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import NormalizationConfig, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify import verify
from sympy import (
    And,
    Basic,
    Eq,
    Expr,
    FiniteSet,
    Float,
    Ge,
    Gt,
    I,
    Integer,
    Integral,
    Intersection,
    Interval,
    Le,
    Limit,
    Lt,
    MatrixBase,
    N,
    Ne,
    Number,
    Product,
    Rational,
    Set,
    Sum,
    Symbol,
    Tuple,
    Union,
    oo,
    solve,
)
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.parsing import sympy_parser


def _refuse(*_: object) -> None:
    raise PermissionError("text is not evaluated here")


# Nothing here gives text to sympy's eval; should it ever, it fails. The units evaluate their names as they load.
import_module("sympy.physics.units")
sympy_parser.eval_expr = _refuse

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off

Span = tuple[Symbol, Set]
"""A variable and the values that it may have."""

EQUAL, DIFFERENT, UNPARSEABLE = "equal", "different", "unparseable"

# Without its list of units, which takes the t of `2t` for one.
_SPELLING = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
_SYMBOLS = ConversionConfig(lowercase_symbols=False)
_DECIMAL = re.compile(r"\d\.\d|\.\d")
_OPERATORS = (Sum, Product, Integral, Limit)
_VALUES = tuple(
    [Rational(*value) for value in values]
    for values in (
        ((5, 7), (9, 7), (16, 7), (23, 7), (31, 7), (44, 7), (57, 7)),
        ((7, 1), (4, 1), (11, 1), (3, 1), (13, 1), (5, 1), (9, 1)),
        ((-11, 9), (13, 9), (-17, 9), (-19, 9), (23, 9), (-29, 9), (31, 9)),
    )
)
"""Where expressions that are equal have equal values: for up to seven symbols."""
_DIGITS = 30
_EXACT = Rational(1, 10**25)


def equivalence(gold: str, answer: str) -> str:
    """`equal`, `different`, or `unparseable` where `answer` (or `gold`) is not mathematics.

    Of an answer `a = b = c` to a gold answer without `=`, c must be the gold answer, and a and b must be c.
    """
    steps = re.split("(?<![<>!:])=", answer) if "=" not in gold else [answer]
    verdicts = [_compare(left, steps[-1]) for left in (gold, *steps[:-1])]
    return next((verdict for verdict in verdicts if verdict != EQUAL), EQUAL)


def _compare(gold: str, answer: str) -> str:
    if _notations(gold) != _notations(answer):
        return DIFFERENT
    kinds = {_brackets(gold), _brackets(answer)}
    if ("{" in kinds and kinds & {"(", "["}) or (kinds == {"(", "["} and _is_pair(gold)):
        return DIFFERENT  # to math-verify the tuple (1,3) is the set {1,3}, and (3,1) is [3,1]
    tolerance = Rational(1, 10 ** (6 if _DECIMAL.search(gold + answer) else 15))
    real = not (_has_i(gold) or _has_i(answer))
    ours, theirs = _span(gold, real), _span(answer, real)
    if ours and theirs and ours[0] != theirs[0]:
        return DIFFERENT
    right = ours[1] if ours else _parse(gold, real)
    said = theirs[1] if theirs else _parse(answer, real)
    if (ours or theirs) and not (isinstance(right, Set) and isinstance(said, Set)):
        right, said = _parse(gold, real), _parse(answer, real)  # one is no set: both as they stand
    if right is None or said is None:
        return UNPARSEABLE
    if (ours or theirs) and isinstance(right, FiniteSet) != isinstance(said, FiniteSet):
        return DIFFERENT  # to math-verify `-3 < x < 7` is (-3, 7) is the two numbers
    if isinstance(right, Eq):
        if isinstance(said, Eq) and all(isinstance(side, Expr) for side in right.args + said.args):
            return EQUAL if _is_same_equation(right, said) else DIFFERENT
        if not isinstance(said, Relational | Set) and not isinstance(right.lhs, Symbol | AppliedUndef):
            return DIFFERENT  # `x + y = 1` is not 1
    return _match(right, said, tolerance) or (EQUAL if _is_same(right, said) else DIFFERENT)


class _Grammar(_Latex2Sympy):
    """As it is, but three times as fast: with a look-ahead whose parse, if there is one, is the full one's."""

    def __init__(self, real: bool, mode: int) -> None:
        super().__init__(is_real=real or None, config=_SYMBOLS)
        self._mode = mode

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp.predictionMode = self._mode
        return parser

    def parse_number(self, text: str) -> Number:
        # The original sends the digits through sympy's parse_expr.
        digits = text.replace(",", "")
        return Integer(digits) if digits.isdigit() else Float(digits, 2 * _DIGITS)


@lru_cache(maxsize=4096)
def _parse(latex: str, real: bool) -> Basic | None:
    # By the grammar only: math-verify reads plain expressions with sympy's parse_expr, which evaluates Python.
    spelt = normalize_latex(_both_signs(latex), _SPELLING)
    parsed = None
    for mode in (PredictionMode.SLL, PredictionMode.LL):
        try:
            parsed = _Grammar(real, mode).parse(spelt)
            break
        except MemoryError:
            raise
        except Exception:
            continue
    if not real and isinstance(parsed, Basic) and not parsed.has(*_OPERATORS):
        parsed = parsed.xreplace({Symbol("i"): I})
    return parsed if isinstance(parsed, Basic | MatrixBase) else None


def _both_signs(latex: str) -> str:
    r"""`1 \pm x` as `1 + x, 1 - x`, also as one of several answers."""
    if r"\pm" not in latex:
        return latex
    answers = _COMMA.split(latex) if latex.count("(") == latex.count("[") == latex.count(r"\{") == 0 else [latex]
    halves = [_PLUS_MINUS.split(answer) for answer in answers]
    return ", ".join(
        f"{half[0]}+{half[1]}, {half[0]}-{half[1]}" if len(half) == 2 else answer
        for answer, half in zip(answers, halves, strict=True)
    )


def _is_same(right: Basic, said: Basic) -> bool:
    return bool(verify([right], [said], timeout_seconds=None))


def _is_same_equation(right: Eq, said: Eq) -> bool:
    """Equal up to a factor, or with the same solutions, of which there must be some."""
    if right.free_symbols != said.free_symbols or not right.free_symbols:
        return right == said
    ours, theirs = right.lhs - right.rhs, said.lhs - said.rhs
    factors = [_at(ours, point) / _at(theirs, point) for point in _points(ours)] if ours and theirs else []
    if factors and all(_difference(factors[0], factor) == EQUAL for factor in factors):
        return True
    polynomials = ours.as_poly(), theirs.as_poly()
    if all(polynomials) and all(polynomial.total_degree() == 1 for polynomial in polynomials):
        return False
    return bool(solve(right, right.free_symbols)) and _is_same(right, said)


def _match(right: Basic, said: Basic, tolerance: Rational) -> str | None:
    """`equal` or `different` where values say so, those of the parts for a set, tuple, interval or matrix.

    Numbers must be equal relative to their size: math-verify rounds 1/2004! and 1/2006! to 0. Expressions with symbols
    are compared at some points.
    """
    if right == said:
        return EQUAL
    if isinstance(right, Expr) and isinstance(said, Expr) and not {MatrixBase, Set} & {*type(right).__mro__}:
        return _match_values(right, said, tolerance)
    if isinstance(right, MatrixBase) and isinstance(said, MatrixBase):
        return _match_all(right.flat(), said.flat(), tolerance) if right.shape == said.shape else DIFFERENT
    if isinstance(right, Interval) and isinstance(said, Interval):
        if (right.left_open, right.right_open) != (said.left_open, said.right_open):
            return DIFFERENT
        return _match_all([right.start, right.end], [said.start, said.end], tolerance)
    if isinstance(right, Tuple) and isinstance(said, Tuple):
        return _match_all(right.args, said.args, tolerance) if len(right) == len(said) else DIFFERENT
    if isinstance(right, FiniteSet) and isinstance(said, FiniteSet) and len(right) == len(said):
        ours, theirs = list(right.args), list(said.args)
        if all(isinstance(part, Expr) and not part.free_symbols for part in ours + theirs):
            return _match_all(sorted(ours, key=_place), sorted(theirs, key=_place), tolerance)
    return None


def _match_all(right: Sequence[Basic], said: Sequence[Basic], tolerance: Rational) -> str | None:
    matches = {_match(ours, theirs, tolerance) for ours, theirs in zip(right, said, strict=True)}
    return DIFFERENT if DIFFERENT in matches else EQUAL if matches == {EQUAL} else None


def _match_values(right: Expr, said: Expr, tolerance: Rational) -> str | None:
    if right.has(*_OPERATORS) or said.has(*_OPERATORS):
        return None
    differences = set()
    for point in _points(right, said):
        differences.add(_difference(_at(right, point), _at(said, point), tolerance))
        if DIFFERENT in differences:
            return DIFFERENT
    return EQUAL if differences == {EQUAL} else None


def _points(*expressions: Expr) -> list[dict[Symbol, Rational]]:
    """Values of their symbols, of both signs; none if there are more symbols than values."""
    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    if len(symbols) > len(_VALUES[0]):
        return []
    return [dict(zip(symbols, values, strict=False)) for values in (_VALUES if symbols else _VALUES[:1])]


def _at(expression: Expr, point: dict[Symbol, Rational]) -> Expr:
    return N(expression.xreplace(point), _DIGITS)


def _difference(left: Expr, right: Expr, tolerance: Rational = _EXACT) -> str | None:
    """`equal`, `different`, or None where they are no numbers, not exact enough, or close but not equal."""
    if not all(value.is_number and value.is_finite and _is_exact(value) for value in (left, right)):
        return None
    gap, size = abs(left - right), max(abs(left), abs(right))
    return EQUAL if gap <= _EXACT * size else DIFFERENT if gap > tolerance * size else None


def _is_exact(value: Expr) -> bool:
    """Whether sympy is sure of its digits: of what may be 0 it is not."""
    return all(part._prec > 80 for part in value.atoms(Float))


def _place(number: Expr) -> tuple[float, float]:
    real, imaginary = N(number).as_real_imag()
    return float(real), float(imaginary)


def _notations(latex: str) -> frozenset[str]:
    """What the grammar reads as something else: primes and dots are dropped, f^{-1}(x), dy/dx and ABC are algebra."""
    return frozenset("".join(found.split()) for found in _MISREAD.findall(latex))


def _brackets(latex: str) -> str:
    """`(` or `[` for a tuple or an interval with two such brackets, `{` for a set, else nothing."""
    match = re.match(r"(\(|\[|\\\{)(?:[^()\[\]{}]|\{[^{}]*\})*(\)|\]|\\\})$", latex.strip())
    return match[1][-1] if match and {match[1][-1], match[2][-1]} in ({"(", ")"}, {"[", "]"}, {"{", "}"}) else ""


def _is_pair(latex: str) -> bool:
    return re.sub(r"\{[^{}]*\}", "", latex).count(",") == 1


def _has_i(latex: str) -> bool:
    """Whether there is an i that is a letter of its own."""
    return "i" in re.sub(r"\\(?:text|mathrm|operatorname)\s*\{[^{}]{2,}\}|\\[A-Za-z]+|_\w|_\{[^{}]*\}", " ", latex)


def _span(latex: str, real: bool) -> Span | None:
    """`x < 3`, `1 < x < 2` or `x < -2 or x > 5`: an interval spelt out, not an inequality still to be solved."""
    if not _INEQUALITY.search(latex) and not _OR.search(latex):
        return None
    unions = [_AND.split(union) for union in _OR.split(latex)]
    span = _joined([_joined([_solved(_parse(part, real)) for part in parts], Intersection) for parts in unions], Union)
    return None if span is None or span[1].is_empty else span


def _joined(spans: Sequence[Span | None], join: Callable[..., Set]) -> Span | None:
    """Of one variable."""
    known = [span for span in spans if span]
    if len(known) < len(spans) or len({name for name, _ in known}) != 1:
        return None
    return known[0][0], join(*(values for _, values in known))


def _solved(relation: Basic | None) -> Span | None:
    """The variable and its values, if the relation names them."""
    if isinstance(relation, And):
        return _joined([_solved(part) for part in relation.args], Intersection)
    if not isinstance(relation, Relational):
        return None
    if isinstance(relation.rhs, Symbol):
        relation = relation.reversed
    name, bound = relation.lhs, relation.rhs
    if not isinstance(name, Symbol) or bound.free_symbols:
        return None
    if isinstance(relation, Eq):
        return name, bound if isinstance(bound, Set) else FiniteSet(bound)
    values = {
        Lt: Interval.open(-oo, bound),
        Le: Interval(-oo, bound),
        Gt: Interval.open(bound, oo),
        Ge: Interval(bound, oo),
        Ne: Union(Interval.open(-oo, bound), Interval.open(bound, oo)),
    }
    return name, values[type(relation)]


_MISREAD = re.compile(
    r"[A-Za-z]'+|[A-Za-z]\s*\^\s*\{\s*-\s*1\s*\}\s*\(|\\(?:arc)?[a-z]{3}\s*\^\s*\{\s*-\s*1\s*\}"
    r"|\\frac\s*\{\s*d\s*\w?\s*\}\s*\{\s*d\s*\w\s*\}|\\(?:angle|triangle)\s*[A-Z]+|\.\.\.|\\[lc]?dots"
)
_COMMA = re.compile(r"\s*[,;]\s*")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg]t|[lg]eq?|neq?)(?![A-Za-z])")
_WORD = r"\s*(?:,?\s*\\text\s*\{{\s*{0}\s*\}}|\\(?:{1})(?![A-Za-z])|(?<![A-Za-z\\]){0}(?![A-Za-z]){2})\s*"
_OR = re.compile(_WORD.format("or", "lor|vee", ""))
_AND = re.compile(_WORD.format("and", "land|wedge", "|,"))
