r"""Whether an answer is worked out: `8\sqrt2` is, `\sqrt{50}+\sqrt{18}` and what stands in the question are not."""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

from grpo_lightning.rewards.verifier.grammar import Claim, Node, read_claim
from grpo_lightning.rewards.verifier.numbers import NoNumber, exact, literal, nodes, precise, symbols
from grpo_lightning.rewards.verifier.tokens import Unreadable
from grpo_lightning.rewards.verifier.units import word_set

_TRIGONOMETRIC = re.compile(r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?")
_TWO = ("number", Fraction(2), None)


@lru_cache(maxsize=1 << 13)
def unfinished(tree: Node) -> frozenset[str]:
    """What is left to do, in words; a gold answer may leave the same to do."""
    found = {f"operator {node[1]}" for node in nodes(tree) if node[0] == "big"}
    found |= {f"operator {node[1]}" for node in nodes(tree) if node[0] == "call" and node[1] in ("det", "conj", "norm")}
    if symbols(tree):
        return frozenset(found)
    for node in nodes(tree):
        kind = node[0]
        if kind == "call" and _TRIGONOMETRIC.fullmatch(node[1]):
            found.add("trigonometry")
        elif kind == "fact" or (kind == "call" and node[1] in ("binom", "!!")):
            found.add("counting")
        elif kind == "call" and node[1] not in ("ln", "log", "lg", "log_", "exp"):
            found.add(f"operator {node[1]}")
        elif kind in ("abs", "percent"):
            found.add(kind)
        elif kind in ("root", "pow") and _is_nested(node):
            found.add("nested roots")
        elif kind == "add":
            terms = node[1:]
            if sum(literal(term) is not None for term in terms) > 1:
                found.add("arithmetic")
            elif _has_like_terms(terms):
                found.add("like terms")
        elif kind == "mul":
            factors = list(_factors(node))
            if sum(literal(factor) is not None and not _is_ten(factor) for factor in factors) > 1:
                found.add("arithmetic")
            if sum(_is_sum(factor) for factor in factors) > 1:
                found.add("product")
        if kind == "pow" and _is_sum(node[1]) and (exact(node[2]) or Fraction()).denominator == 1:
            found.add("product")
        if kind == "pow" and node[1] == ("constant", "i"):
            found.add("product")
        if kind == "pow" and any(part == ("constant", "i") for part in nodes(node[2])):
            found.add("complex exponential")
        if kind == "div" and any(part == ("constant", "i") for part in nodes(node[2])):
            found.add("quotient")
    return frozenset(found)


def _factors(tree: Node) -> Iterator[Node]:
    for part in tree[1:]:
        if part[0] == "mul":
            yield from _factors(part)
        else:
            yield part


def _is_ten(tree: Node) -> bool:
    return tree[0] == "pow" and tree[1] == ("number", Fraction(10), None)


def _is_sum(tree: Node) -> bool:
    return tree[0] == "add"


def _is_nested(node: Node) -> bool:
    """Whether a root has a root in it that is no mere fraction of integers."""
    if node[0] == "pow" and (literal(node[2]) or Fraction(1)).denominator == 1:
        return False
    inner = node[2] if node[0] == "root" else node[1]
    return any(part[0] == "root" or (part[0] == "pow" and exact(part) is None) for part in nodes(inner))


def _has_like_terms(terms: tuple[Node, ...]) -> bool:
    """Whether two irrational terms could be added up: their ratio is a small fraction."""
    by = precise(30)
    values = []
    for term in terms:
        if exact(term) is None and any(part[0] in ("root", "pow") for part in nodes(term)):
            try:
                values.append(by.value(term, {}))
            except NoNumber:
                continue
    for index, left in enumerate(values):
        for right in values[:index]:
            ratio = left / right if right else 0
            near = Fraction(str(by.context.re(ratio))).limit_denominator(1000) if ratio else Fraction()
            if ratio and abs(ratio - by.context.mpf(near.numerator) / near.denominator) < 1e-20:
                return True
    return False


def is_restated(gold: Claim, answer: Claim, question: str) -> bool:
    """Whether the answer stands so in the question, or has not the form that is asked for."""
    return _restates(gold, answer, question) or _has_other_form(gold, answer, question)


def _restates(gold: Claim, answer: Claim, question: str) -> bool:
    """Whether the answer, or a part of it that is to be worked out, stands in the question, and the gold's does not."""
    said = {canonical(part) for part in _parts(answer)}
    right = {canonical(part) for part in _parts(gold)}
    asked = expressions(question)
    if any(part in asked and part not in right for part in said - {()}):
        return True
    whole = {tree[1] for tree in asked if tree[0] == "whole"}
    if whole and whole & {*map(canonical, _all_nodes(answer))} - {*map(canonical, _all_nodes(gold))}:
        return True  # `what is asked + 0`
    forms = {_form(part) for part in _parts(gold)}
    if any((form := _form(part)) in asked and form not in forms for part in _parts(answer)):
        return True
    wanted = {value for part in _parts(gold) if (value := literal(part)) is not None and part[0] != "div"}
    return any(_is_asked_quotient(part, question) for part in _parts(answer) if literal(part) in wanted)


def _is_asked_quotient(tree: Node, question: str) -> bool:
    r"""Whether a division that comes out is the question's, left undone: `48/2` or `480/20` where it has 48 and a 2."""
    if tree[0] == "neg":
        return _is_asked_quotient(tree[1], question)
    if tree[0] != "div" or (literal(tree) or Fraction(1, 2)).denominator > 1:
        return False
    top, bottom = (abs(literal(part) or Fraction()) for part in tree[1:])
    known = numbers_of(question)
    if bottom == 1 or top in known:
        return top in known and bottom != 1
    scales = ((x, top / x) for x in known if x > 1)
    return any(1 in (k.numerator, k.denominator) and bottom / k in known - {x} for x, k in scales)


def _form(tree: Node) -> Node:
    """Whether a number that is not whole is a decimal, a percentage or a fraction, and which."""
    value = literal(tree)
    if value is None or value.denominator == 1 or tree[0] not in ("number", "percent", "div"):
        return ()
    return ("form", "decimal" if tree[0] == "number" and tree[2] is not None else tree[0], value)


def _has_other_form(gold: Claim, answer: Claim, question: str) -> bool:
    """Whether the question asks to expand or to factor, the gold answer did, and the answer did not."""
    right, said = next(_parts(gold), ()), next(_parts(answer), ())
    if not right or not said or not symbols(right):
        return False
    if _EXPAND.search(question):
        return not _has_products(right) and _has_products(said)
    return bool(_FACTOR.search(question)) and right[0] in ("mul", "pow", "neg") and said[0] == "add"


def _has_products(tree: Node) -> bool:
    """Whether a product of sums, or a power of one, is to be multiplied out."""
    for node in nodes(tree):
        if node[0] == "mul" and any(part[0] == "add" and symbols(part) for part in _factors(node)):
            return True
        if node[0] == "pow" and node[1][0] == "add" and (literal(node[2]) or 0) > 1:
            return True
    return False


def _all_nodes(claim: Claim) -> Iterator[Node]:
    return (node for item in claim.items for node in nodes(item.chain[2][-1]))


def _parts(claim: Claim) -> Iterator[Node]:
    """The values that a claim is made of."""
    for item in claim.items:
        _, operators, operands = item.chain
        if (operators and set(operators) - {"=", "approx", "in"}) or (
            operators and not set(operators) - {"="} and operands[0][0] not in ("symbol", "named", "apply", "words")
        ):
            yield item.chain
        for operand in operands[-1:]:
            if operand[0] in ("group", "set", "matrix"):
                yield operand
                yield from (part for part in nodes(operand) if part is not operand)
            elif operand[0] != "choice":
                yield operand


def canonical(tree: Node) -> Node:
    """One tree for all orders of terms and factors; nothing for what is no formula to be worked out."""
    if exact(tree) is not None and tree[0] in ("number", "neg", "percent"):
        return ()
    return _sorted(tree) if tree[0] in _COMPOUND else ()


_COMPOUND = word_set("add mul div pow root call fact abs apply big matrix chain union meet minus builder pm ratio")


def _sorted(tree: Node) -> Node:
    if not tree:
        return tree
    parts = tuple(
        (
            _sorted(part)
            if part and isinstance(part[0], str)
            else tuple(_sorted(p) if isinstance(p, tuple) else p for p in part)
        )
        if isinstance(part, tuple)
        else part
        for part in tree
    )
    if tree[0] == "number":
        return tree[:2]
    if tree[0] in ("add", "mul"):
        flat: list[Node] = []
        for part in parts[1:]:
            flat += part[1:] if part[0] == tree[0] else [part]
        flat = [part for part in flat if part != ("number", Fraction(tree[0] == "mul"))]
        return (tree[0], *sorted(flat, key=repr)) if len(flat) > 1 else (flat or [parts[1]])[0]
    if tree[0] in ("div", "pow") and parts[2] == ("number", Fraction(1)):
        return parts[1]
    if tree[0] == "neg":
        return ("mul", *sorted([("number", Fraction(-1)), *parts[1:]], key=repr))
    return parts


@lru_cache(maxsize=1 << 10)
def expressions(question: str) -> frozenset[Node]:
    """The formulas in a question and their parts in canonical form, and the long ones once more, marked as whole."""
    texts = [next(group for group in match.groups() if group is not None) for match in _FORMULA.finditer(question)]
    texts += [match[0] for match in _PLAIN.finditer(_FORMULA.sub(" . ", question))]
    found = set()
    for text in texts:
        for brackets in (True, False):
            try:
                claim = read_claim(text.strip(" .,:;?"), frozenset(), brackets)
            except Unreadable:
                continue
            trees = [node for item in claim.items for node in nodes(item.chain)]
            found |= {canonical(tree) for tree in trees if tree[0] != "chain" or tree[1]} | set(map(_form, trees))
            sides = (side for item in claim.items for side in item.chain[2] if sum(1 for _ in nodes(side)) > 5)
            found |= {("whole", tree) for side in sides if (tree := canonical(side))}
            break
    return frozenset(found - {()})


@lru_cache(maxsize=1 << 10)
def words_of(question: str) -> frozenset[str]:
    """The words of a question, in small letters."""
    return frozenset(word.casefold() for word in re.findall(r"[^\W\d_]{3,}", question))


@lru_cache(maxsize=1 << 10)
def numbers_of(question: str) -> frozenset[Fraction]:
    """The numbers that a question gives, in digits or in words: 2 of `half` and of `two`, 12 of `a dozen`."""
    digits = (Fraction(match[0].replace(",", "")) for match in _NUMBER.finditer(question))
    said = (_COUNTS.get(word) or _COUNTS.get(word.removesuffix("s")) for word in words_of(question))
    return frozenset((*digits, *(Fraction(number) for number in said if number)))


_FORMULA = re.compile(r"\$\$?((?:\\\$|[^$])+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PLAIN = re.compile(
    r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|sqrt|sin|cos|tan|[\d{}()\[\]^_+*/=<>|!.,&%\\-]|\s(?=\S))+"
)
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_CARDINALS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
_COUNTS = {
    **{word: value for value, word in enumerate(_CARDINALS.split(), 2)},
    **{"twice": 2, "double": 2, "half": 2, "halve": 2, "pair": 2, "couple": 2, "both": 2},
    **{"third": 3, "thrice": 3, "triple": 3, "fourth": 4, "quarter": 4, "fifth": 5, "sixth": 6, "seventh": 7},
    **{"eighth": 8, "ninth": 9, "tenth": 10, "dozen": 12, "percent": 100, "percentage": 100, "hundred": 100},
    **{"day": 24, "week": 7, "weekly": 7, "month": 12, "year": 12, "hour": 60, "minute": 60, "second": 60},
    **{"foot": 12, "feet": 12, "yard": 3, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "thousand": 1000},
    **{"decade": 10, "century": 100, "cent": 100, "meter": 100, "metre": 100, "kilometer": 1000, "kilogram": 1000},
}  # fmt: skip
_EXPAND = re.compile(r"\b(?:expand|multiply out)\b", re.IGNORECASE)
_FACTOR = re.compile(r"\bfactor(?:ise|ize)?\b", re.IGNORECASE)
