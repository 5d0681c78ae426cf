r"""Whether two short LaTeX answers mean the same, by math-verify. Runs in a worker process, never in ours."""

import logging
import re
from functools import lru_cache

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.logic import And
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, N, Symbol
from sympy.core.relational import Relational

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off

EQUAL, DIFFERENT, UNPARSEABLE = "equal", "different", "unparseable"

# Without its list of units, which takes the t of `2t` for one.
_LATEX = [LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True))]
_TOLERANCE = 1e-6


def equivalence(gold: str, answer: str) -> str:
    """`equal`, `different`, or `unparseable` where `answer` (or `gold`) is not mathematics.

    Of an answer `a = b = c` to a gold answer without `=`, c must be the gold answer, and a and b must be c.
    """
    steps = re.split("(?<![<>!:])=", answer) if "=" not in gold else [answer]
    verdicts = [_compare(left, steps[-1]) for left in (gold, *steps[:-1])]
    return next((verdict for verdict in verdicts if verdict != EQUAL), EQUAL)


def _compare(gold: str, answer: str) -> str:
    if {_brackets(gold), _brackets(answer)} == {"(", "{"}:
        return DIFFERENT  # to math-verify the tuple (1,3) is the set {1,3}
    golds, answers = _parse(gold), _parse(answer)
    if not golds or not answers:
        return UNPARSEABLE
    if not _is_close(golds[0], answers[0]):
        return DIFFERENT
    same = verify(golds, answers, allow_set_relation_comp=_is_solved(answers[0]), timeout_seconds=None)
    return EQUAL if same else DIFFERENT


@lru_cache(maxsize=4096)
def _parse(latex: str) -> list[Basic]:
    # Only as LaTeX: math-verify reads plain expressions with sympy's parse_expr, which evaluates Python.
    return parse(rf"\boxed{{{latex}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)


def _brackets(latex: str) -> str:
    """`(` for a tuple or an interval, `{` for a set, else nothing."""
    match = re.match(r"(\(|\\\{)(?:[^(){}]|\{[^{}]*\})*(?:\)|\\\})$", latex.strip())
    return match[1][-1] if match else ""


def _is_solved(relation: Basic) -> bool:
    """Whether it is `x < 3` or `1 < x < 2`: an interval spelt out, not an inequality still to be solved."""
    parts = relation.args if isinstance(relation, And) else (relation,)
    return all(
        isinstance(part, Relational)
        and any(isinstance(side, Symbol) for side in part.args)
        and not all(side.free_symbols for side in part.args)
        for part in parts
    )


def _is_close(gold: Basic, answer: Basic) -> bool:
    """Not for two numbers that differ relative to their size: math-verify rounds 1/2004! and 1/2006! to 0."""
    if gold == answer or not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return True
    if gold.free_symbols or answer.free_symbols:
        return True
    left, right = N(gold, 30), N(answer, 30)
    return bool(abs(left - right) <= _TOLERANCE * max(abs(left), abs(right)))
