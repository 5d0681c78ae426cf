"""Compares two claims. It runs in a worker process, since the texts come from a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from typing import Any

from grpo_lightning.plugins.verifier import asked, equality, finished, restated
from grpo_lightning.plugins.verifier.choices import choices_in
from grpo_lightning.plugins.verifier.grammar import MONTHS, Claim, Item, Node, read_claim
from grpo_lightning.plugins.verifier.numbers import (
    exact,
    infinity,
    is_decimal,
    is_infinite,
    is_percent,
    literal,
    nodes,
    symbols,
)
from grpo_lightning.plugins.verifier.prose import read_sentence
from grpo_lightning.plugins.verifier.rules import rewriting, rule
from grpo_lightning.plugins.verifier.settling import (
    WHOLES,
    Settled,
    base_of,
    bound_names,
    by_names,
    choice_of,
    chosen,
    condition,
    expanded,
    has_signs,
    is_true_chain,
    padded,
    renamed,
    scaled,
    settle,
    system,
    values_agree,
    vector,
    with_argument,
    with_counter,
)
from grpo_lightning.plugins.verifier.spans import (
    FLIPPED,
    SPANS,
    Span,
    is_interval,
    is_span,
    span_of,
    span_of_claim,
    union_of_claim,
)
from grpo_lightning.plugins.verifier.spellings import (
    are_amounts,
    components,
    concluded,
    excluded,
    is_nothing,
    is_of_time,
    without_conditions,
    without_point,
)
from grpo_lightning.plugins.verifier.tokens import Unreadable, tokenize
from grpo_lightning.plugins.verifier.units import Unit, conversion

EQUAL, DIFFERENT, UNPARSEABLE, RESTATED, GOLD_BAD = "equal", "different", "unparseable", "restated", "gold_bad"
_BARE_UNIT = rule(r"(.*[\d})])(?:\s|\\[, ])*([A-Za-z]{1,2})(\^\{?\d\}?)?", "«5 m»", r"«\frac{1}{2}\,cm^2»", "m")
_WITHOUT_LAYOUT = rewriting(r"[\s{}$]|\\text|\\[,;! ]", "", r"5 \, \text{apples} -> 5apples")
_WITH_PRODUCTS = rewriting(
    r"(?<=[\d)])\s*(?=\(-?\d+(?:\.\d+)?\))", r"\\cdot ", r"2(3) + (-1) -> 2\cdot (3) + (-1)", "f(3) -> f(3)"
)
_BASED = rule(r"[\dA-F]+_\{?(\d+)\}?", "«144_8»", "«1A_{16}»", "144")
_BASE = rule(
    r"\bbase[\s$-]*(\d+|two|three|four|five|six|seven|eight|nine)\b",
    "in «base $8»$",
    "a «base-nine» number",
    "the base of 8",
    "a base 8th",
)
_SPELT = {"2": "two", "3": "three", "4": "four", "5": "five", "6": "six", "7": "seven", "8": "eight", "9": "nine"}
_DIGITS = rule(r"[\dA-F]+", "«144»", "«1A»", "x")
_MODULAR = rule(
    r"\b(?:remainder|mod|modulo|units digit|congruen)|\\[pb]?mod|\\equiv",
    "the «remainder»",
    "«congruen»t «mod»ulo 7",
    r"3 «\equiv» 10 «\pmod»{7}",
    "a sum",
)
_LOOSE = frozenset(["unit", "point"])
_APPLIED = rule(r"[A-Za-z]\w*'*\(([a-z])\)", "«f(x)»", "«g'(t)»", "f(3)")
_ROUNDED = rule(
    r"\b(?:round|nearest|approximat|closest|estimat|decimal|about|tenth|hundredth)",
    "«Round» to the «nearest» cent",
    "How many?",
    flags=re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """Conventions on which graders differ: arguments of `MathVerifier`, explained there."""

    percent: bool = True
    degrees: bool = True
    convert_units: bool = False
    ordered_lists: bool = False
    tuples_are_intervals: bool = False
    finished: bool = True
    decimals: int = 10


def compare(gold: str, answer: str, question: str = "", policy: dict[str, Any] | None = None) -> str:
    """The outcome for an answer: `equal`, `different`, `unparseable`, `restated`, or `gold_bad`."""
    return _Comparison(Policy(**(policy or {})), question).outcome(gold, answer)


class _Comparison:
    def __init__(self, policy: Policy, question: str) -> None:
        self.policy, self.question = policy, question
        self.allowed: frozenset[str] = frozenset()
        self.asked = asked.expressions(question)
        self.context = asked.context_of(question)

    def outcome(self, gold: str, answer: str) -> str:
        try:
            gold_tokens = _spelling(gold)
        except Unreadable:
            return GOLD_BAD
        known = asked.words_of(self.question)
        if answer.endswith(" !") and "!" in gold:
            answer = f"{answer[:-2]}!"
        try:
            gold_claim = read_claim(gold, known)
        except Unreadable:
            return self._by_spelling(gold_tokens, answer)
        self.allowed = finished.allowed((item.chain for item in gold_claim.items), asked.is_concrete(self.question))
        claim: Claim | None
        try:
            claim = _remainder(gold_claim, read_claim(self._with_base(gold, answer), known), self.question)
        except Unreadable:
            claim = self._rewritten(answer, known)
        except RecursionError:
            return UNPARSEABLE
        equal = self._equal_reading(gold_claim, claim, answer, known)
        if equal is None:
            return DIFFERENT if claim else self._by_spelling(gold_tokens, answer)
        wants_work = self.policy.finished and self.question and not _is_spelt(answer, gold_tokens)
        return RESTATED if wants_work and restated.is_restated(gold_claim, equal, self.question) else EQUAL

    def _equal_reading(self, gold: Claim, claim: Claim | None, answer: str, known: frozenset[str]) -> Claim | None:
        """The claim of the first reading of an answer that equals the gold claim; None if none does."""
        if claim and self.same(gold, claim):
            return claim
        if claim and len(claim.items) == 1 < len(gold.items):
            parts = self._split(answer, known)
            return parts if parts and self.same(gold, parts) else None
        if claim and self._with_unit(gold, answer, known):
            return claim
        if len(gold.items) == 1 and (settled := settle(gold.items[0])) and literal(_bare(settled.value)) is not None:
            sentence = read_sentence(answer, known, self.question)
            return sentence if sentence and self.same(gold, sentence) else None
        return None

    def _with_base(self, gold: str, answer: str) -> str:
        """`144` as `144_8` where the gold answer has a base, and the question asks for it."""
        based = _BASED.fullmatch(gold.strip())
        if not based or not _DIGITS.fullmatch(answer.strip()):
            return answer
        is_asked = any(match[1] in (based[1], _SPELT.get(based[1])) for match in _BASE.finditer(self.question))
        return f"{answer.strip()}_{{{based[1]}}}" if is_asked else answer

    def _rewritten(self, answer: str, known: frozenset[str]) -> Claim | None:
        r"""What follows the question's own words (`4 \star 3 = 10`), with `2(3)` for a product in front of a result."""
        asked_for, equals, rest = answer.partition("=")
        if not equals:
            return None
        bare = _WITHOUT_LAYOUT(asked_for)
        rest = rest if len(bare) > 2 and bare in _WITHOUT_LAYOUT(self.question) else answer
        before, equals, result = rest.rpartition("=")
        try:
            return read_claim(_WITH_PRODUCTS(before) + equals + result, known)
        except (Unreadable, RecursionError):
            return None

    def _split(self, answer: str, known: frozenset[str]) -> Claim | None:
        """The answer with every comma read as a separator: `100,200` is a list if the gold answer is one."""
        try:
            return read_claim(answer.replace(",", ", "), known) if "," in answer else None
        except Unreadable:
            return None

    def _with_unit(self, gold: Claim, answer: str, known: frozenset[str]) -> bool:
        """Whether the answer is equal if its last letters are a unit: `5m` where the gold answer is in metres."""
        bare = _BARE_UNIT.fullmatch(answer.strip())
        if not bare or not gold.items[-1].unit:
            return False
        try:
            return self.same(gold, read_claim(f"{bare[1]}\\text{{ {bare[2]}}}{bare[3] or ''}", known))
        except Unreadable:
            return False

    def _by_spelling(self, gold: tuple[str, ...], answer: str) -> str:
        try:
            spelling = _spelling(answer)
        except Unreadable:
            return UNPARSEABLE
        return EQUAL if spelling == gold else UNPARSEABLE

    # ----- claims

    def same(self, gold: Claim, answer: Claim) -> bool:
        """Whether two claims are equal."""
        if is_nothing(gold) or is_nothing(answer):
            return is_nothing(gold) and is_nothing(answer)
        gold_letter, letter = choice_of(gold), choice_of(answer)
        if gold_letter:
            return gold_letter == letter and self.same_text(letter, answer)
        if letter and (offered := self.offered(letter)):
            return self.same_text(letter, answer) and self.same(gold, offered)
        gold, answer = system(gold), concluded(without_conditions(gold, system(chosen(answer))))
        if "trailing" in answer.joins and "trailing" not in gold.joins:
            return False
        if excluded(gold):
            return bool(excluded(answer)) and self.same_excluded(gold, answer)
        conditions = [condition(claim) for claim in (gold, answer)]
        if conditions[0] is not None:
            return self.same_families(gold, answer)
        if conditions[1] is not None and conditions[1][1] in (("numbers", "R"), ("numbers", "Z")):
            answer = Claim(answer.items[:-1], answer.joins if len(answer.items) > 2 else frozenset())
        if (
            len(gold.items) == 1
            and answer.joins == {"or"}
            and all(
                literal(item.chain[2][-1]) is not None and self.same_item(gold.items[0], item) for item in answer.items
            )
        ):
            return True  # `3/4 or 75 %`
        named = by_names(gold)
        if len(named) > 1:
            return self.same_assignments(named, gold, answer)
        span, other = span_of_claim(gold), span_of_claim(answer)
        if span and len(span.pieces) > 1 and (parts := union_of_claim(answer)):
            other = parts
        if span and other and (is_span(gold) or is_span(answer)):
            return self.same_spans(span, other)
        if "where" in answer.joins or "where" in gold.joins:
            return False
        golds, answers = self.members(gold), self.members(answer)
        if golds is None and len(answer.items) > 1 and answers is None:
            return self.same_tuple(gold, answer)
        if golds is not None or answers is not None:
            return self.same_members(gold, answer, golds, answers)
        if len(gold.items) != 1 or len(answer.items) != 1:
            return False
        return self.same_item(gold.items[0], answer.items[0])

    def offered(self, letter: str) -> Claim | None:
        """The claim of a choice of the question; None if there is no such choice, or it cannot be read."""
        text = choices_in(self.question).get(letter, "")
        try:
            return read_claim(text) if text else None
        except Unreadable:
            return None

    def same_text(self, letter: str, answer: Claim) -> bool:
        """Whether the text after a letter, if there is one, is that of the question."""
        value = answer.items[0].chain[2][0]
        offered = self.offered(letter)
        return value[0] != "choice" or offered is None or self.same(offered, value[2])

    def same_excluded(self, gold: Claim, answer: Claim) -> bool:
        r"""Whether formula and excluded values are the same: `x+1` for `x \ne 1`."""
        return (
            len(gold.items) == len(answer.items)
            and self.same_item(gold.items[0], answer.items[0])
            and all(self.same_relation(a.chain, b.chain) for a, b in zip(gold.items[1:], answer.items[1:], strict=True))
        )

    def same_item(self, gold: Item, answer: Item) -> bool:
        """Whether two single items are equal in kind, names, unit and value."""
        answer = self.in_percent(self.in_unit(gold, answer))
        gold_settled, settled = settle(gold), settle(answer, not gold.chain[1], self.asked)
        factor = self.unit_factor(gold.unit, answer.unit)
        if factor is None or not are_amounts(answer):
            return False
        if gold_settled is None:
            return self.same_relation(gold.chain, answer.chain)
        if settled is None:
            return (
                len(gold.chain[1]) == 1
                and len(symbols(gold.chain)) > 1
                and self.same_relation(gold.chain, answer.chain)
            )
        settled = with_argument(gold_settled, settled)
        if _is_function_of(gold.chain, gold_settled, settled):
            settled = Settled(settled.value, gold_settled.names, settled.order, settled.links, settled.close)
        if not _is_kind(gold, gold_settled.value, answer, settled.value) or (
            settled.close is not None
            and literal(settled.value) is None
            and not self.is_rounding(gold_settled.value, settled.close)
        ):
            return False
        if gold_settled.names and settled.names and not gold_settled.names & settled.names:
            return (
                len(symbols(gold.chain)) > 1
                and len(gold.chain[1]) == 1 == len(answer.chain[1])
                and self.same_relation(gold.chain, answer.chain)
            )
        if not is_true_chain(settled) or (settled.names - gold_settled.names) & symbols(settled.value):
            return False
        if gold_settled.names and not settled.names and any(literal(link) is not None for link in settled.links):
            return False  # `0 = 0` is no claim about x
        gold_value, answer_value = gold_settled.value, settled.value
        if gold.unit and is_percent(answer_value):
            return False
        if factor != 1:
            answer_value = (
                ("number", factor * value, None) if (value := literal(answer_value)) is not None else answer_value
            )
        if literal(gold_value) is not None and literal(answer_value) is None and not symbols(answer_value):
            answer_value = next((link for link in settled.links if literal(link) is not None), answer_value)
        if gold_settled.close is not None and self.same_value(gold_settled.close, answer_value, gold.unit, answer.unit):
            return True
        if settled.close is not None and literal(gold_value) is not None and literal(answer_value) is None:
            return self.same_value(gold_value, settled.close, gold.unit, answer.unit)
        return self.same_value(gold_value, answer_value, gold.unit, answer.unit)

    def is_rounding(self, gold: Node, close: Node) -> bool:
        """Whether the rounded value after an exact one is no second answer: the question may want a whole number."""
        value = literal(close)
        if value is None or value.denominator > 1 or is_decimal(close) or abs(value) >= 100:
            return True
        return literal(gold) is not None and bool(_ROUNDED.search(self.question))

    def in_unit(self, gold: Item, answer: Item) -> Item:
        """An amount in several units, read in the unit of the gold answer if listed: 90 minutes of `90 min = 1.5 h`."""
        if not answer.amounts or not gold.unit or answer.unit == gold.unit:
            return answer
        found = next((amount for amount in answer.amounts if amount[1] == gold.unit), None)
        if found is None:
            return answer
        last = (answer.chain[2][-1], answer.unit)
        others = tuple(amount for amount in answer.amounts if amount is not found)
        return Item(("chain", (), found[:1]), gold.unit, amounts=(*others, last))

    def in_percent(self, answer: Item) -> Item:
        r"""`\frac{10}{50} \times 100 = 20\%`, with the percent sign that its left side leaves out."""
        _, operators, operands = answer.chain
        value = operands[-1]
        if not self.policy.percent or value[0] != "percent" or set(operators) != {"="}:
            return answer
        bare = exact(value[1])
        links = [value if link[0] in ("mul", "div") and exact(link) == bare else link for link in operands]
        return replace(answer, chain=("chain", operators, tuple(links)))

    def unit_factor(self, gold: Unit, answer: Unit) -> Fraction | None:
        """The factor that converts the answer's number to the unit of the gold answer; None if there is none."""
        if not gold or not answer or gold == answer:
            return Fraction(1)
        gold_powers, answer_powers = dict(gold), dict(answer)
        if self.policy.degrees and {*gold_powers, *answer_powers} <= {"degree", "radian"}:
            return Fraction(1)
        if set(gold_powers) <= _LOOSE or set(answer_powers) <= _LOOSE:
            return Fraction(1)
        return conversion(answer, gold) if self.policy.convert_units else None

    # ----- several things

    def members(self, claim: Claim) -> list[Node] | None:
        """The values of a list or a set, in order; None if the claim is one value."""
        if len(claim.items) == 1:
            settled = settle(claim.items[0])
            if settled is None:
                return None
            value = settled.value
            if value[0] == "set" or has_signs(value):
                return list(expanded([*value[1:]] if value[0] == "set" else [value]))
            return None
        values = []
        names: set[str] = set()
        for item in claim.items:
            settled = settle(item)
            if settled is None or (item.unit != claim.items[-1].unit and item.unit):
                return None
            if settled.names and names and not {base_of(name) for name in settled.names} & {*map(base_of, names)}:
                return None
            if not is_true_chain(settled):
                return None
            names |= settled.names
            values.append(settled.value)
        return list(expanded(values))

    def same_members(self, gold: Claim, answer: Claim, golds: list[Node] | None, answers: list[Node] | None) -> bool:
        if golds is None or answers is None:
            return False
        if any(part == ("dots",) for part in golds + answers):
            return len(golds) == len(answers) and all(map(self.same_part, golds, answers))
        braces = [
            any(node[0] == "set" for item in claim.items for node in nodes(item.chain)) for claim in (gold, answer)
        ]
        if any(braces):
            golds, answers = self.distinct(golds), self.distinct(answers)
        if len(golds) != len(answers):
            return False
        if self.policy.ordered_lists and not any(braces):
            return all(map(self.same_part, golds, answers))
        return self.is_matching(golds, answers)

    def is_matching(self, golds: Sequence[Node], answers: Sequence[Node]) -> bool:
        """Whether each gold value equals an answer that no other gold value is matched with."""
        left = list(answers)
        for part in golds:
            found = next((other for other in left if self.same_part(part, other)), None)
            if found is None:
                return False
            left.remove(found)
        return True

    def distinct(self, values: Sequence[Node]) -> list[Node]:
        """The values without repetitions."""
        found: list[Node] = []
        for value in values:
            if not any(values_agree(value, other) for other in found):
                found.append(value)
        return found

    def same_part(self, gold: Node, answer: Node) -> bool:
        """Whether two parts of lists or tuples are equal; a percent sign counts."""
        return is_percent(gold) == is_percent(answer) and self.same_value(gold, answer)

    def same_tuple(self, gold: Claim, answer: Claim) -> bool:
        """Whether named values are the gold tuple: `x=2, y=3` for `(2,3)`."""
        settled = settle(gold.items[0])
        named = by_names(answer)
        if settled is None or settled.value[0] != "group" or settled.value[1:3] != ("(", ")") or "or" in answer.joins:
            return False
        if len(named) != len(answer.items):
            return False
        order = settled.order if settled.order and set(settled.order) == set(named) else sorted(named)
        golds, answers = settled.value[3:], [named[name] for name in order]
        return len(golds) == len(answers) and all(map(self.same_part, golds, answers))

    def same_assignments(self, named: dict[str, Node], gold: Claim, answer: Claim) -> bool:
        """Whether the answer has the named values of the gold answer: `b=3, a=2`, `(2,3)` or `2, 3` for `a=2, b=3`."""
        if "or" in answer.joins and "or" not in gold.joins:
            return False
        answers = by_names(answer)
        if answers:
            return set(answers) == set(named) and all(self.same_part(named[name], answers[name]) for name in named)
        values = [settled.value for item in answer.items if (settled := settle(item)) and not settled.names]
        if len(answer.items) == 1:
            settled = settle(answer.items[0])
            if settled is None or settled.value[0] != "group" or (settled.order and list(settled.order) != list(named)):
                return False
            values = list(settled.value[3:]) if settled.value[1:3] == ("(", ")") else []
        return len(values) == len(named) and all(map(self.same_part, named.values(), values))

    def same_families(self, gold: Claim, answer: Claim) -> bool:
        r"""Whether two families are equal up to the name of the counter: `\frac\pi2 + n\pi, n \in \mathbb Z`."""
        gold_condition, answer_condition = condition(gold), condition(answer)
        if gold_condition is None or answer_condition is None or gold_condition[1] != answer_condition[1]:
            return False
        rest = [Claim(claim.items[:-1], claim.joins) for claim in (gold, answer)]
        others = tuple(
            Item(renamed(item.chain, {answer_condition[0]: gold_condition[0]}), item.unit) for item in rest[1].items
        )
        return self.same(rest[0], Claim(others, rest[1].joins))

    # ----- values

    def same_value(self, gold: Node, answer: Node, gold_unit: Unit = (), answer_unit: Unit = ()) -> bool:
        """Whether two values are equal and the answer is in finished form."""
        kinds = gold[0], answer[0]
        answer = with_counter(gold, answer)
        gold_number, answer_number = literal(gold), literal(answer)
        if {*dict(gold_unit), *dict(answer_unit)} == {"degree", "radian"}:
            return self.same_angle(gold, answer, gold_unit, answer_unit)
        if gold_number is not None:
            if answer_number is None:
                return self.same_angle(gold, answer, gold_unit, answer_unit)
            if self.policy.finished and finished.unfinished_number(answer) - self.allowed:
                return False
            return same_number(
                gold_number, answer_number, is_percent(gold), is_percent(answer), is_decimal(gold, answer), self.policy
            )
        if (gold[0] == "symbol" and answer[0] == "words") or gold[0] == "words":
            return _same_words(gold, answer)
        if not self.policy.degrees and kinds.count("degree") == 1:
            return False
        if WHOLES.intersection(kinds):
            return self.same_whole(gold, answer)
        if gold[0] == "percent" or answer[0] == "percent":
            if kinds[0] != kinds[1]:
                return False
            gold, answer = gold[1], answer[1]
        if (answer[0] == "constant" and answer[1] == "inf") or gold == ("constant", "inf") or is_infinite(gold):
            return infinity(gold) == infinity(answer) != 0
        if self.policy.finished and finished.unfinished(answer) - self.allowed - _free_of(gold, answer):
            return False
        if answer_number is not None and is_decimal(answer) and not self.is_long(answer):
            return exact(gold) is not None and equality.equal(gold, answer, self.context)
        return equality.equal(gold, answer, self.context) or self.same_angle(gold, answer, gold_unit, answer_unit)

    def is_long(self, answer: Node) -> bool:
        """Whether a decimal has nine digits or more, enough to identify an irrational number."""
        return answer[0] == "number" and len(str(answer[1].numerator)) >= 9

    def same_angle(self, gold: Node, answer: Node, gold_unit: Unit, answer_unit: Unit) -> bool:
        """Whether degrees and radians are one angle; one side has a degree sign and the other a pi."""
        if not self.policy.degrees:
            return False
        bare = [node[1] if node[0] == "degree" else node for node in (gold, answer)]
        units = [
            "degree" if node[0] == "degree" else dict(unit) for node, unit in ((gold, gold_unit), (answer, answer_unit))
        ]
        in_degrees = ["degree" in unit for unit in units]
        if any("radian" in unit for unit in units) and any(in_degrees):
            pairs = [("degree", node) if flag else node for node, flag in zip(bare, in_degrees, strict=True)]
            return equality.equal_constants(*pairs)
        has_pi = [any(part == ("constant", "pi") for part in nodes(node)) for node in bare]
        if in_degrees == [True, True] or (any(in_degrees) and not any(has_pi)):
            return self.same_value(*bare) if (gold, answer) != tuple(bare) else False
        if in_degrees == [True, False] and has_pi == [False, True]:
            return equality.equal_constants(("degree", bare[0]), bare[1])
        if in_degrees == [False, True] and has_pi == [True, False]:
            return equality.equal_constants(bare[0], ("degree", bare[1]))
        return False

    def same_whole(self, gold: Node, answer: Node) -> bool:
        """Whether two compound values are equal: tuples, intervals, sets, matrices and others."""
        spans = span_of(gold), span_of(answer)
        if all(spans) and (gold[0] in SPANS or answer[0] in SPANS or is_interval(gold) != is_interval(answer)):
            return self.same_spans(*spans)  # type: ignore[arg-type]
        gold, answer = scaled(components(gold)), scaled(components(answer))
        if gold[:3] == ("group", "(", ")") and len(gold) > 4:
            answer = without_point(answer)
        if {gold[0], answer[0]} == {"matrix", "group"}:
            gold, answer = (vector(gold), vector(answer))
        if gold[0] == "ratio" and len(gold) == 3 and literal(answer) is not None:
            parts = [literal(part) for part in gold[1:]]
            return None not in parts and bool(parts[1]) and parts[0] / parts[1] == literal(answer)  # type: ignore[operator]
        if gold[0] == "ratio" and answer[0] == "time":
            return [literal(part) for part in gold[1:]] == list(answer[2:])
        if gold[0] == "time" and answer[0] == "ratio":
            return is_of_time(gold, answer)
        if gold[0] != answer[0]:
            return False
        if gold[0] == "group":
            if gold[1:3] != answer[1:3] and not (
                self.policy.tuples_are_intervals and {gold[1:3], answer[1:3]} == {("(", ")"), ("[", "]")}
            ):
                return False
            return len(gold) == len(answer) and all(map(self.same_part, gold[3:], answer[3:]))
        if gold[0] == "matrix":
            if [len(row) for row in gold[1:]] != [len(row) for row in answer[1:]]:
                return False
            return all(
                self.same_part(a, b)
                for gold_row, answer_row in zip(gold[1:], answer[1:], strict=True)
                for a, b in zip(gold_row, answer_row, strict=True)
            )
        if gold[0] == "cases":
            return len(gold) == len(answer) and any(
                all(len(a) == len(b) and all(map(self.same_cell, a, b)) for a, b in zip(gold[1:], other, strict=True))
                for other in permutations(answer[1:])
                if len(answer) < 6
            )
        if gold[0] == "set":
            one, two = (Claim((Item(("chain", (), (node,))),)) for node in (gold, answer))
            return self.same_members(one, two, self.members(one), self.members(two))
        if gold[0] == "builder":
            return self.same_builder(gold, answer)
        if gold[0] == "mod":
            return self.same_part(gold[2], answer[2]) and equality.equal(gold[1], answer[1], self.context)
        if gold[0] in ("union", "meet", "minus"):
            pairs = [answer[1:], answer[:0:-1]] if gold[0] != "minus" else [answer[1:]]
            return any(all(map(self.same_part, gold[1:], pair)) for pair in pairs)
        if gold[0] == "chain":
            return self.same_relation(gold, answer)
        if gold[0] == "ratio":
            return len(gold) == len(answer) and all(map(self.same_part, gold[1:], answer[1:]))
        if gold[0] == "time":
            return gold[1] == answer[1] and padded(gold[2:]) == padded(answer[2:])
        return gold == answer

    def same_cell(self, gold: Node, answer: Node) -> bool:
        """Whether two cells of a table of cases are equal: conditions or values."""
        if gold[0] == "chain" or answer[0] == "chain":
            spans = span_of(gold), span_of(answer)
            return self.same_spans(*spans) if all(spans) else self.same_relation(gold, answer)  # type: ignore[arg-type]
        return self.same_value(gold, answer)

    def same_builder(self, gold: Node, answer: Node) -> bool:
        """Whether two set builders are equal up to the names of their variables."""
        bound = [bound_names(node) for node in (gold, answer)]
        if len(bound[0]) != len(bound[1]) or len(gold) != len(answer):
            return False
        for order in permutations(bound[0]):
            other = renamed(answer, dict(zip(bound[1], order, strict=True)))
            if self.same_part(gold[1], other[1]) and all(map(self.same_cell, gold[2:], other[2:])):
                return True
        return False

    def same_spans(self, gold: "Span", answer: "Span") -> bool:
        """Whether two sets of real numbers are equal, and have the same variable if both name one."""
        if gold.name and answer.name and gold.name != answer.name:
            return False
        if any(finished.unfinished(end) - self.allowed for end in answer.ends):
            return False
        if len(gold.pieces) != len(answer.pieces):
            return False
        return all(
            (a.left_closed, a.right_closed) == (b.left_closed, b.right_closed)
            and self.same_end(a.left, b.left)
            and self.same_end(a.right, b.right)
            for a, b in zip(gold.pieces, answer.pieces, strict=True)
        )

    def same_end(self, gold: Node, answer: Node) -> bool:
        """Whether two ends of intervals are equal; an end may be infinite."""
        return gold == answer or self.same_value(gold, answer)

    # ----- relations

    def same_relation(self, gold: Node, answer: Node) -> bool:
        """Whether two equations or inequalities are equivalent up to a factor; a chain is compared link by link."""
        gold_relation, answer_relation = _oriented(gold), _oriented(answer)
        if gold_relation is None or answer_relation is None or gold_relation[0] != answer_relation[0]:
            return False
        operators, gold_sides, answer_sides = gold_relation[0], gold_relation[1], answer_relation[1]
        if self._pairwise(gold_sides, answer_sides) or (
            set(operators) <= {"=", "ne"} and self._pairwise(gold_sides, answer_sides[::-1])
        ):
            return True
        if len(operators) > 1 or operators[0] not in ("=", "ne", "<", "le"):
            return False
        if self.policy.finished and any(finished.unfinished(side) - self.allowed - {"power"} for side in answer_sides):
            return False
        if len(symbols(gold)) < 2 and operators[0] == "=" and _is_solved(gold):
            return False
        if any(node[0] in WHOLES for side in (*gold_sides, *answer_sides) for node in nodes(side)):
            return False
        differences = [("add", sides[0], ("neg", sides[1])) for sides in (gold_sides, answer_sides)]
        sign = equality.proportional(*differences)
        return sign is not None and (operators[0] in ("=", "ne") or sign > 0)

    def _pairwise(self, golds: Sequence[Node], answers: Sequence[Node]) -> bool:
        if len(golds) != len(answers):
            return False
        return all(a == b for a, b in zip(golds, answers, strict=True)) or (
            (len(golds) > 2 or any(part[0] in WHOLES or literal(part) is not None for part in (*golds, *answers)))
            and all(self.same_value(a, b) for a, b in zip(golds, answers, strict=True))
        )


# ----- units


def _kinds(item: Item, value: Node) -> set[str]:
    """The kinds of unit of an item: units of the table, degrees, percent."""
    return {name for name, _ in item.unit} | {_SIGNS[node[0]] for node in (value,) if node[0] in _SIGNS}


_SIGNS = {"degree": "degree", "percent": "percent"}
_TEMPERATURES = {"celsius", "fahrenheit", "radian"}


def _bare(value: Node) -> Node:
    r"""The number of `60^\circ` and `25\%`."""
    return value[1] if value[0] in _SIGNS else value


def _is_kind(gold: Item, gold_value: Node, answer: Item, answer_value: Node) -> bool:
    """Whether the answer has a unit of the kind of the gold answer, or none: no dollars for degrees."""
    gold_kinds, answer_kinds = _kinds(gold, gold_value), _kinds(answer, answer_value)
    if not gold_kinds or gold_kinds <= _LOOSE or (answer_kinds <= _LOOSE and answer_kinds):
        return True
    if not answer_kinds:
        return not answer.counts
    return (
        bool(gold.unit and answer.unit)
        or gold_kinds == answer_kinds
        or (gold_kinds | answer_kinds) - {"degree"} <= _TEMPERATURES
    )


def _is_function_of(gold: Node, gold_settled: Settled, settled: Settled) -> bool:
    """Whether the answer is `f(x) = 2x+3` where the gold answer is `y = 2x+3`."""
    if len(gold_settled.names) != 1 or len(settled.names) != 1:
        return False
    (gold_name,), (answer_name,) = gold_settled.names, settled.names
    applied = _APPLIED.fullmatch(answer_name)
    is_plain = len(gold_name) == 1 and gold_name not in symbols(gold_settled.value) and gold[1] == ("=",)
    return applied is not None and is_plain and symbols(gold_settled.value) == {applied[1]} == symbols(settled.value)


# ----- numbers


def same_number(
    gold: Fraction, answer: Fraction, gold_percent: bool, answer_percent: bool, decimal: bool, policy: Policy
) -> bool:
    """Whether two numbers are equal, a decimal up to its digits. `*_percent`: whether it has a percent sign."""
    if gold == answer and (gold_percent == answer_percent or policy.percent or gold == 0):
        return True
    # To "What percentage?" both 25 and 25 % are answers. 0.25 means 25 %, but 0.25 % does not.
    if gold_percent != answer_percent:
        bare, percent = (answer, gold) if gold_percent else (gold, answer)
        return policy.percent and abs(bare) >= 1 and bare == 100 * percent
    # 0.0833333333333 is 1/12 up to its digits; a whole number is always exact.
    both = gold.denominator > 1 and answer.denominator > 1
    return decimal and both and abs(gold - answer) * 10**policy.decimals <= max(abs(gold), abs(answer))


def _free_of(gold: Node, answer: Node) -> frozenset[str]:
    """The unfinished operations that the kind of the gold answer allows."""
    is_complex = any(node == ("constant", "i") for node in nodes(gold))
    return frozenset(["complex exponential"] if is_complex else [])


def _remainder(gold: Claim, answer: Claim, question: str) -> Claim:
    r"""2 of `2 \pmod 7` and of `2^{100} \equiv 2 \pmod 7`, if a remainder is asked for and the gold answer a number."""
    item = answer.items[0]
    _, operators, operands = item.chain
    if len(answer.items) > 1 or len(gold.items) > 1 or operands[-1][0] != "mod" or not _MODULAR.search(question):
        return answer
    value, modulus = literal(operands[-1][1]), literal(operands[-1][2])
    is_least = value is not None and modulus is not None and 0 <= value < modulus
    if literal(gold.items[0].chain[2][-1]) is None or not is_least or {*operators} - {"equiv", "="}:
        return answer
    return Claim((replace(item, chain=("chain", (), (operands[-1][1],))),), answer.joins)


def _same_words(gold: Node, answer: Node) -> bool:
    gold_text, answer_text = _text(gold), _text(answer)
    return bool(gold_text) and gold_text == answer_text


def _text(tree: Node) -> str:
    if tree[0] == "words":
        words = [str(word).casefold().rstrip(".") for word in tree[1:]]
        while len(words) > 1 and words[0] in ("the", "a", "an", "on", "in"):
            words = words[1:]
        if MONTHS.intersection(words):
            words = sorted(word for word in words if word not in ("th", "st", "nd", "rd", "of", "the"))
        return " ".join(words)
    if tree[0] == "symbol":
        return str(tree[1]).casefold()
    return ""


# ----- relations


def _oriented(chain: Node) -> tuple[tuple[str, ...], tuple[Node, ...]] | None:
    """The chain with all inequalities in one direction; None if they have no common direction."""
    if chain[0] != "chain" or not chain[1]:
        return None
    _, operators, operands = chain
    if any(operator in (">", "ge") for operator in operators):
        operators = tuple(FLIPPED.get(operator, operator) for operator in operators[::-1])
        operands = operands[::-1]
    if any(operator in (">", "ge") for operator in operators):
        return None
    return operators, operands


def _is_solved(chain: Node) -> bool:
    return chain[2][0][0] in ("symbol", "named", "apply") and not symbols(chain[2][1])


def _is_spelt(text: str, spelling: tuple[str, ...]) -> bool:
    try:
        return _spelling(text) == spelling
    except Unreadable:
        return False


def _spelling(text: str) -> tuple[str, ...]:
    """The tokens of a text, without braces that only group."""
    found = tuple(token.text for token in tokenize(text) if token.text not in ("{", "}"))
    if text.count("{") - text.count(r"\{") != text.count("}") - text.count(r"\}") or not found:
        raise Unreadable("open braces")
    return found
