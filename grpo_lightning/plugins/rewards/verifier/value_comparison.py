"""Compares two claims. It runs in a worker process, since the texts come from a model."""

from collections.abc import Iterator, Set
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import chain, dropwhile
from typing import Any

from grpo_lightning.plugins.rewards.verifier import equality, finished, question, restated
from grpo_lightning.plugins.rewards.verifier.claims import (
    COUNTERS,
    LISTS,
    WHOLES,
    Form,
    choice_of,
    expanded,
    form_of,
    is_true,
    simple,
)
from grpo_lightning.plugins.rewards.verifier.grammar import Claim, Item, Node, number_node, read_claim
from grpo_lightning.plugins.rewards.verifier.numbers import (
    exact,
    is_decimal,
    is_percent,
    literal,
    nodes,
    renamed,
    symbols,
)
from grpo_lightning.plugins.rewards.verifier.sentences import read_sentence
from grpo_lightning.plugins.rewards.verifier.spans import FLIPPED, LINE, Span, is_only_span, minus, span_of, union_of
from grpo_lightning.plugins.rewards.verifier.tokens import Unreadable, tokenize
from grpo_lightning.plugins.rewards.verifier.units import LOOSE, Unit, conversion
from grpo_lightning.plugins.rewards.verifier.words import MONTHS, changes, word_set

EQUAL = "equal"
DIFFERENT = "different"
UNPARSEABLE = "unparseable"
RESTATED = "restated"
GOLD_BAD = "gold_bad"
_MODULAR = ("remainder", "mod", "units digit", "congruen", r"\equiv")
_ROUNDED = word_set("round nearest approximat closest estimat decimal about tenth hundredth")
_VERDICTS = word_set("yes no true false")
_NOTHING = (("chain", (), (("set",),)),)
_DEGREES = word_set("degree celsius fahrenheit radian")
_SIGNS = ("degree", "percent")
_CONSTANTS = word_set("A B C D K c k C_1 C_2 c_1 c_2")
"""Names that a constant of integration has."""
_ARTICLES = word_set("the a an on in it it's is be will")


def compare(gold: str, answer: str, question: str = "", policy: dict[str, Any] | None = None) -> str:
    """Returns the outcome for an answer: `equal`, `different`, `unparseable`, `restated`, or `gold_bad`."""
    return Comparison(question, **(policy or {})).outcome(gold, answer)


def explain(gold: str, answer: str, question: str = "", policy: dict[str, Any] | None = None) -> dict[str, str]:
    """Returns the claims of gold answer and answer, and the first two values that differ."""
    comparison = Comparison(question, **(policy or {}))
    comparison.outcome(gold, answer)
    claims = [_shown_claim(claim) for claim in comparison.claims] + ["not one claim"] * 2
    difference = " and ".join(map(shown, comparison.difference or ())) or "none"
    return {"gold_claim": claims[0], "claim": claims[1], "difference": difference}


def _shown_claim(claim: Claim) -> str:
    units = (" ".join(f"{name}^{power}" for name, power in item.unit) for item in claim.items)
    items = (f"{shown(item.chain)} {unit}".strip() for item, unit in zip(claim.items, units, strict=True))
    return f" {'/'.join(sorted(claim.joins))} ".join(items)


def shown(tree: Node) -> str:
    """Returns a tree as one line: `add(x, mul(2, pi))`."""
    if tree[:1] == ("chain",):
        _, operators, operands = tree
        right_sides = zip(operators, operands[1:], strict=True)
        return shown(operands[0]) + "".join(f" {operator} {shown(operand)}" for operator, operand in right_sides)
    kind, *children = [shown(child) if isinstance(child, tuple) else str(child) for child in tree]
    return children[0] if kind in ("number", "symbol", "constant") else f"{kind}({', '.join(children)})"


class Comparison:
    """Compares answers to a question with its gold answer. The switches are arguments of `MathVerifier`."""

    def __init__(
        self,
        problem: str,
        percent: bool = True,
        convert_units: bool = True,
        ordered_lists: bool = False,
        finished: bool = True,
    ) -> None:
        self.question = problem
        self.percent = percent
        self.convert_units = convert_units
        self.finished = finished
        self.question_words = question.words_of(problem)
        self.question_keys = question.formulas_of(problem).keys | ({("known",)} if self.question_words else set())
        self.is_ordered = ordered_lists or question.wants(problem, "order")
        self.counter = ""
        r"""The counter of the families that are compared: k of `k \pi`."""
        self.allowed: frozenset[str] = frozenset()
        """The operations that an answer may leave."""
        self.claims: list[Claim] = []
        """The claims of gold answer and answer, as compared last."""
        self.difference: tuple[Node, Node] | None = None
        """The first two values that differ."""

    def outcome(self, gold: str, answer: str) -> str:
        """Returns the outcome, as of `compare`."""
        # The same tokens are equal, even if nobody can read them.
        if not (spelling := _spelling(gold)):
            return GOLD_BAD
        if _spelling(answer) == spelling:
            return EQUAL

        # `No, 57 = 3 \cdot 19` is a no with its reason.
        verdict = gold.strip().casefold()
        words = answer.casefold().replace(r"\text", "").replace("{", "").replace("}", "").split()
        is_verdict = verdict in _VERDICTS and words[:1] == [f"{verdict},"]
        if is_verdict and _VERDICTS.isdisjoint(words) and not changes(words[1:]):
            return EQUAL

        # The answer may be read in several ways. The first that is equal counts.
        try:
            gold_claim = read_claim(gold, self.question_words)
        except Unreadable:
            return UNPARSEABLE
        self.allowed = finished.allowed(
            (operand for item in gold_claim.items for operand in item.operands), self.question
        )
        self.claims = [gold_claim]
        for claim in self.readings(gold_claim, answer):
            self.claims[1:] = [claim]
            if self.is_other_name(form_of(gold_claim), form_of(claim)):
                return DIFFERENT
            if self.same(gold_claim, claim):
                wants_work = self.finished and self.question
                return RESTATED if wants_work and restated.is_restated(gold_claim, claim, self.question) else EQUAL
        return DIFFERENT if self.claims[1:] else UNPARSEABLE

    def readings(self, gold: Claim, answer: str) -> Iterator[Claim]:
        """Yields the claims that an answer may make: read strictly, behind the question's own words, as a sentence."""
        side, _, right_side = answer.partition("=")
        is_copied = right_side and len(_bare_text(side)) > 2 and _bare_text(side) in _bare_text(self.question)
        for text in (answer, right_side) if is_copied else (answer,):
            try:
                yield self._without_modulus(gold, read_claim(text, self.question_words))
                break
            except (Unreadable, RecursionError):
                continue
        is_value = len(gold.items) == 1 and gold.items[0].value[0] != "words"
        if is_value and (sentence := read_sentence(answer, self.question_words, self.question)):
            yield sentence

    def _without_modulus(self, gold: Claim, answer: Claim) -> Claim:
        r"""Returns 2 for `2 \pmod 7` and `2^{100} \equiv 2 \pmod 7`, if the question wants a remainder modulo 7."""
        last = answer.items[-1].value
        wants_remainder = literal(gold.items[0].value) is not None and question.speaks_of(self.question, _MODULAR)
        if last[0] != "mod" or not wants_remainder:
            return answer
        operands = [*(item.value for item in answer.items[:-1]), last[1]]
        modulus = literal(last[2])
        values = [*map(literal, operands)]
        numbers = question.numbers_of(self.question) | ({Fraction(10)} if "digit" in self.question_words else set())
        if modulus not in numbers or not all(value is not None and 0 <= value < modulus for value in values):
            return answer
        return Claim(tuple(Item(("chain", (), (operand,))) for operand in operands), answer.joins)

    # ----- claims

    def same(self, gold: Claim, answer: Claim) -> bool:
        """Tells whether two claims are equal."""
        # "No solutions" equals nothing else.
        is_nothing = [tuple(item.chain for item in claim.items) == _NOTHING for claim in (gold, answer)]
        if any(is_nothing):
            return all(is_nothing)

        # A choice: the letters are equal, or the gold answer and the text of the choice; a text with it must fit.
        gold_letter = choice_of(gold)
        letter = choice_of(answer)
        offered = self._offered(letter)
        if gold_letter or offered:
            inside = answer.items[0].value
            is_text = inside[0] != "choice" or offered is None or self.same(offered, inside[2])
            return is_text and (gold_letter == letter if gold_letter or not offered else self.same(gold, offered))

        # The normal forms, with one name for the counter of a family.
        is_relation = len(gold.items) == 1 and gold.items[0].operators
        left = form_of(gold)
        right = form_of(answer, None if is_relation else self.question_keys)
        if left is None or right is None or "trailing" in right.joins - left.joins:
            return False
        if self.is_ordered and right.value[0] == "chain" and {*right.value[1]} in ({"<"}, {">"}):
            right = replace(right, value=("list", *right.value[2]))  # `1 < 2 < 3`
        if not self.same_domain(left, right):
            return False
        is_family = ("numbers", "Z") in [form.domain[1] for form in (left, right) if form.domain]
        names = [left.domain[0]] if left.domain else sorted(symbols(left.value) & COUNTERS)
        self.counter = names[0] if is_family and len(names) == 1 else ""
        return self.same_form(left, _with_names(left, right, _CONSTANTS - self.question_words))

    def is_other_name(self, gold: Form | None, answer: Form | None) -> bool:
        """Tells whether the answer has the name of a variable of the question, which wants another variable."""
        if gold is None or answer is None:
            return False
        wanted_names = question.variables_of(self.question)
        is_variable = len(answer.names) == 1 and all(len(name) == 1 and name in self.question for name in answer.names)
        return not gold.names and is_variable and bool(wanted_names) and wanted_names.isdisjoint(answer.names)

    def _offered(self, letter: str) -> Claim | None:
        """Returns the claim of a choice of the question; None if there is no such choice, or it cannot be read."""
        text = question.choices_in(self.question).get(letter, "")
        try:
            return read_claim(text) if text else None
        except Unreadable:
            return None

    def same_domain(self, gold: Form, answer: Form) -> bool:
        """Tells whether the side conditions are the same; conditions that say nothing may be left out."""
        if gold.domain and answer.domain:
            is_bound = [form.domain[0] in symbols(form.value) for form in (gold, answer) if form.domain]
            if gold.domain[1] != answer.domain[1] or is_bound[0] != is_bound[1]:
                return False
        elif not (_is_free(gold.domain, answer) and _is_free(answer.domain, gold)):
            return False
        golds, answers = gold.excluded, answer.excluded
        return not golds or (len(golds) == len(answers) and all(map(self.same_relation, golds, answers)))

    def same_form(self, gold: Form, answer: Form) -> bool:
        """Tells whether two claims are equal in names, unit and value."""
        factor = self._unit_factor(gold.item.unit, answer.item.unit)
        value = answer.value
        chains = gold.item.chain, answer.item.chain
        is_equation = len(gold.item.operators) == len(answer.item.operators) == 1 and len(symbols(chains[0])) > 1
        names = gold.names, answer.names
        if factor is None or (all(names) and names[0].isdisjoint(names[1]) and _bare(gold).isdisjoint(_bare(answer))):
            return factor is not None and is_equation and self.same_relation(*chains)
        is_span = span_of(gold.value) and span_of(value)
        if "chain" in (gold.value[0], value[0]) and not is_span:
            return (is_equation or gold.value[0] == "chain") and self.same_relation(*chains)
        if not self._is_kind(gold.item, gold.value, answer.item, value) or not self._is_one_value(gold, answer):
            return False
        if factor != 1:
            value = number_node(factor * (literal(value) or 0))
        if literal(gold.value) is not None and literal(value) is None and not symbols(value):
            value = next((link for link in answer.links if literal(link) is not None), answer.close or value)
        units = gold.item.unit or question.unit_of(self.question), answer.item.unit
        return any(self.same_value(reading, value, *units) for reading in (gold.close, gold.value) if reading)

    def same_members(self, gold: Node, answer: Node) -> bool:
        """Tells whether two lists have the same members; a set drops repeated ones."""
        golds, answers = ([*expanded(node[1:] if node[0] in LISTS else [node])] for node in (gold, answer))
        is_set = any(node[0] == "set" for tree in (gold, answer) for node in nodes(tree))
        if is_set:
            golds = [*dict.fromkeys(golds)]
            answers = [*dict.fromkeys(answers)]
        if len(golds) != len(answers):
            return False
        if ("dots",) in golds or ("dots",) in answers or (self.is_ordered and not is_set):
            return all(map(self.same_member, golds, answers))
        for member in golds:
            match = next((candidate for candidate in answers if self.same_member(member, candidate)), None)
            if match is None:
                return False
            answers.remove(match)
        return True

    def same_records(self, gold: Node, answer: Node) -> bool:
        """Tells whether two claims give the same values, if one of them has names.

        If both have names, values of one name are compared: `b=3, a=2` is `a=2, b=3`, and so is `(2,3)`.
        """
        if gold[0] == answer[0]:
            named = dict(answer[1:])
            is_same = {*named} == {name for name, _ in gold[1:]}
            return is_same and all(self.same_member(value, named[name]) for name, value in gold[1:])
        is_gold = gold[0] == "record"
        record, values_only = (gold, answer) if is_gold else (answer, gold)
        values = [value for _, value in (gold[1:] if is_gold else sorted(answer[1:]))]
        # Roots `x_1`, `x_2`, in any order.
        if values_only[0] in LISTS and len({name.partition("_")[0] for name, _ in record[1:]}) == 1:
            pair = ("list", *values), values_only
            return self.same_members(*(pair if is_gold else pair[::-1]))
        bare_values = values_only[3:] if values_only[0] == "group" else values_only[1:]
        is_plain = values_only[0] in ("list", "both") or values_only[:3] == ("group", "(", ")")
        golds, answers = (values, bare_values) if is_gold else (bare_values, values)
        return is_plain and len(golds) == len(answers) and all(map(self.same_member, golds, answers))

    def _is_one_value(self, gold: Form, answer: Form) -> bool:
        """Tells whether an answer names one value: its links and its rounding agree with it, and no name is in it."""
        links = answer.links
        if answer.value[0] == "percent" and self.percent:  # `\frac{10}{50} \times 100 = 20\%`
            links = tuple(link for link in links if exact(link) != exact(answer.value[1]))
        if not is_true(replace(answer, links=links)) or (answer.names - gold.names) & symbols(answer.value):
            return False
        rounded = literal(answer.close) if answer.close and literal(answer.value) is None else None
        if rounded is None or rounded.denominator > 1 or is_decimal(answer.close or ()) or abs(rounded) >= 100:
            return True
        return literal(gold.value) is not None and question.speaks_of(self.question, _ROUNDED)

    def _unit_factor(self, gold: Unit, answer: Unit) -> Fraction | None:
        """Returns the factor that converts the answer's number to the gold answer's unit; None if there is none."""
        question_unit = question.unit_of(self.question)
        expected_unit = gold or question_unit
        names = {*dict(expected_unit)}, {*dict(answer)}
        is_angle = {"degree"} in names and names[0] | names[1] <= _DEGREES
        if expected_unit == answer or is_angle or any(unit_names <= LOOSE for unit_names in names):
            return Fraction(1)
        if gold:
            return (
                conversion(answer, gold) if self.convert_units and self.question_words and not question_unit else None
            )
        above, answer_above = ([factor for factor in unit if factor[1] > 0] for unit in (expected_unit, answer))
        is_spoken = all(question.speaks_of(self.question, [name]) for name in names[0] ^ names[1])
        return Fraction(1) if above == answer_above and is_spoken else None  # `miles` for `miles per day`

    def _is_kind(self, gold: Item, gold_value: Node, answer: Item, answer_value: Node) -> bool:
        """Tells whether the answer has a unit of the kind of the gold answer, or none: no dollars for degrees."""
        gold_kinds = _kinds(gold, gold_value)
        answer_kinds = _kinds(answer, answer_value)
        if not gold_kinds:
            is_fraction = answer_value[0] == "percent" and abs(literal(gold_value) or Fraction()) <= 1
            return is_fraction or answer_value[0] not in _SIGNS or question.allows(answer_value[0], self.question)
        if not answer_kinds:
            return gold_kinds <= LOOSE or not answer.counts
        is_loose = gold_kinds <= LOOSE or answer_kinds <= LOOSE or gold_kinds | answer_kinds <= _DEGREES
        return (
            is_loose or gold_kinds == answer_kinds or bool(gold.unit and answer.unit and not is_percent(answer_value))
        )

    # ----- values

    def same_member(self, gold: Node, answer: Node) -> bool:
        """Tells whether two members of lists or tuples are equal; a percent sign counts."""
        return is_percent(gold) == is_percent(answer) and self.same_value(gold, answer)

    def same_value(self, gold: Node, answer: Node, gold_unit: Unit = (), answer_unit: Unit = ()) -> bool:
        """Tells whether two values are equal and the answer is in finished form."""
        simple_gold = simple(gold, answer)
        simple_answer = simple(answer, simple_gold)
        is_same = self._same_value(simple(simple_gold, simple_answer), simple_answer, gold_unit, answer_unit)
        if not is_same and self.difference is None:
            self.difference = gold, answer
        return is_same

    def _same_value(self, gold: Node, answer: Node, gold_unit: Unit, answer_unit: Unit) -> bool:
        """Tells whether two values in one spelling are equal and the answer is in finished form."""
        # A number in the base of the question is written with the base or without.
        kinds = gold[0], answer[0]
        if "base" in self.question_words and {*kinds} == {"base", "number"}:
            base = gold[2] if gold[0] == "base" else answer[2]
            based = [("base", str(node[1]), base) for node in (gold, answer)]
            if base in question.numbers_of(self.question) and None not in map(exact, based):
                gold, answer = based

        # Numbers, words, and compound values.
        gold_number = literal(gold)
        answer_number = literal(answer)
        units = {*dict(gold_unit), *dict(answer_unit)}
        if units == {"degree", "radian"} or (gold_number is not None and answer_number is None):
            return self.same_angle(gold, answer, gold_unit, answer_unit)
        if gold_number is not None and answer_number is not None:
            return not self.is_open(answer) and self._same_number(gold_number, answer_number, gold, answer)
        if "words" in kinds:
            return bool(_texts(gold)) and _texts(gold)[0] in _texts(answer)
        if {*kinds} & (WHOLES | {*LISTS, "record", "chain"}):
            return self.same_compound(gold, answer)

        # Formulas, which must be in finished form. A decimal is no answer where the gold answer is exact.
        may_stay = {"complex pow"} if ("constant", "i") in nodes(gold) else set()
        may_stay |= {"function cos", "function sin"} if "complex pow" in self.allowed else set()
        is_longer = not symbols(gold) and finished.num_terms(answer) > finished.num_terms(gold)
        if self.is_open(answer, may_stay) or (is_longer and self.finished):
            return False
        is_short = answer[0] != "number" or len(str(answer[1].numerator)) < 9
        if answer_number is not None and is_decimal(answer) and is_short and exact(gold) is None:
            return False
        is_same = equality.equal(gold, answer, *question.kind_of(self.question)) or equality.same_family(
            gold, answer, self.counter
        )
        return is_same or self.same_angle(gold, answer, gold_unit, answer_unit)

    def is_open(self, answer: Node, may_stay: Set[str] = frozenset()) -> bool:
        """Tells whether an operation remains in an answer that neither the gold answer has nor `may_stay`."""
        return self.finished and not finished.unfinished(answer) <= self.allowed | may_stay

    def _same_number(self, number: Fraction, value: Fraction, gold: Node, answer: Node) -> bool:
        """Tells whether two numbers are equal, a decimal up to its digits."""
        percents = is_percent(gold), is_percent(answer)
        if number == value and (percents[0] == percents[1] or self.percent or number == 0):
            return True
        # To "What percentage?" both 25 and 25 % are answers. 0.25 means 25 %, but 0.25 % does not.
        if percents[0] != percents[1]:
            bare, percent = (value, number) if percents[0] else (number, value)
            return self.percent and abs(bare) >= 1 and bare == 100 * percent
        # 0.0833333333333 is 1/12 up to its digits; a whole number is always exact.
        is_rounded = is_decimal(gold, answer) and number.denominator > 1 < value.denominator
        return is_rounded and abs(number - value) * 10**10 <= max(abs(number), abs(value))

    def same_angle(self, gold: Node, answer: Node, gold_unit: Unit, answer_unit: Unit) -> bool:
        """Tells whether degrees and radians are one angle; one side has a degree sign and the other a pi."""
        pairs = ((gold, gold_unit), (answer, answer_unit))
        bare = [node[1] if node[0] == "degree" else node for node, _ in pairs]
        in_degrees = [node[0] == "degree" or "degree" in dict(unit) for node, unit in pairs]
        in_radians = [("constant", "pi") in nodes(node) or "radian" in dict(unit) for node, unit in pairs]
        if in_degrees[0] != in_degrees[1] and in_radians == in_degrees[::-1]:
            return equality.equal_constants(*(("degree", b) if d else b for b, d in zip(bare, in_degrees, strict=True)))
        return [gold, answer] != bare and (all(in_degrees) or not any(in_radians)) and self.same_value(*bare)

    def same_compound(self, gold: Node, answer: Node) -> bool:
        """Tells whether two compound values are equal: tuples, intervals, sets, matrices and others."""
        kind = gold[0]
        if "record" in (kind, answer[0]):
            return self.same_records(gold, answer)
        if is_only_span(gold) or is_only_span(answer):
            span = span_of(gold)
            answer_span = span_of(answer)
            if span and len(span.pieces) > 1 and answer[0] in LISTS:
                answer_span = union_of(answer) or answer_span
            if (span and answer_span) or {kind, answer[0]} & {*LISTS} - {"set"}:
                return bool(span and answer_span and self.same_spans(span, answer_span))
        if {kind, answer[0]} & {*LISTS}:
            return self.same_members(gold, answer)
        if "time" in (kind, answer[0]):
            gold_half, gold_clock = _clock(gold)
            half, clock = _clock(answer)
            return gold_half in ("", half) and gold_clock == clock
        if kind == "ratio" and answer[0] != "ratio":
            values = [literal(child) or Fraction() for child in gold[1:]]
            return bool(len(values) == 2 and values[1] and values[0] / values[1] == literal(answer))
        if kind == answer[0] == "cases":
            pairs = _rows(gold), _rows(answer)
            return len(pairs[0]) == len(pairs[1]) and all(
                any(self.same_value(a, b) and self.same_spans(s, t) for b, t in pairs[1]) for a, s in pairs[0]
            )
        if kind != answer[0] or kind in ("numbers", "dots", "base", "builder"):
            return gold == answer
        shape, members = _shaped(gold)
        answer_shape, answer_members = _shaped(answer)
        return shape == answer_shape and all(map(self.same_member, members, answer_members))

    def same_spans(self, gold: Span, answer: Span) -> bool:
        """Tells whether two sets of real numbers are equal, and have the same variable if both name one."""
        golds, answers = gold.pieces, answer.pieces
        if (gold.name and answer.name and gold.name != answer.name) or len(golds) != len(answers):
            return False
        ends = [[end for piece in pieces for end in piece[:2]] for pieces in (golds, answers)]
        are_alike = [piece[2:] for piece in golds] == [piece[2:] for piece in answers]
        return are_alike and all(
            end == answer_end or self.same_value(end, answer_end) for end, answer_end in zip(*ends, strict=True)
        )

    # ----- relations

    def same_relation(self, gold: Node, answer: Node) -> bool:
        """Tells whether two equations or inequalities are equal up to a factor; chains are compared link by link."""
        left = _oriented(gold)
        right = _oriented(answer)
        if left is None or right is None or left[0] != right[0]:
            return False
        operators, golds = left
        answers = right[1]
        is_symmetric = set(operators) <= {"=", "ne"}
        if len(golds) == len(answers) and all(map(self.same_value, golds, answers)):
            return True
        if len(operators) > 1:
            return False
        if any(self.is_open(side, {"power", "power in a number"}) for side in answers):
            return False
        differences = [("add", sides[0], ("neg", sides[1])) for sides in (golds, answers)]
        ratio = equality.constant(("div", differences[1], differences[0]))
        return ratio is not None and ratio != 0 and ratio.imag == 0 and (is_symmetric or ratio.real > 0)


# ----- units


def _kinds(item: Item, value: Node) -> set[str]:
    """Returns the kinds of unit of an item: units of the table, degrees, percent."""
    return {name for name, _ in item.unit} | {value[0]} & {*_SIGNS}


# ----- names, lists, words


def _with_names(gold: Form, answer: Form, free: Set[str]) -> Form:
    r"""Returns the answer with the gold answer's counters and constants: `2n\pi` becomes `2k\pi`, `A e^x` `C e^x`."""
    counters = {form.domain[0] for form in (gold, answer) if form.domain}
    if counters or ("constant", "pi") in nodes(gold.value):
        counters |= COUNTERS
    names = symbols(gold.value), symbols(answer.value)
    gold_only = sorted(names[0] - names[1])
    answer_only = sorted(names[1] - names[0])
    are_free = {*gold_only, *answer_only} <= counters | free and (counters or {*gold_only} < names[0])
    if len(gold_only) != len(answer_only) or not are_free or (gold.value[0] in LISTS and not counters):
        return answer
    return replace(answer, value=renamed(answer.value, dict(zip(answer_only, gold_only, strict=True))))


def _bare(form: Form) -> set[str]:
    """Returns the names without the variables of the value: y of `y(x) = 2x`."""
    ends = tuple(f"({name})" for name in symbols(form.value))
    return {name.rpartition("(")[0] if name.endswith(ends) else name for name in form.names}


def _is_free(domain: tuple[str, Node] | None, form: Form) -> bool:
    """Tells whether a domain may be left out: the reals, or the integers for a counter of the other claim."""
    name, numbers = domain or ("", ("numbers", "R"))
    is_counter = name in COUNTERS and bool(symbols(form.value) & COUNTERS)
    return numbers == ("numbers", "R") or (numbers == ("numbers", "Z") and is_counter)


def _texts(tree: Node) -> list[str]:
    """Returns words as one text, then the words before and behind each `is` (`It is odd`); none for other trees."""
    if tree[0] not in ("words", "symbol"):
        return []
    words = [str(word).casefold().rstrip(".") for word in tree[1:]]
    if MONTHS.intersection(words):
        words = sorted(word for word in words if word not in ("th", "st", "nd", "rd", "of", "the"))
    cuts = [index for index, word in enumerate(words) if word == "is"] if not changes(words) else []
    texts = [words, *(words_beside for cut in cuts for words_beside in (words[:cut], words[cut + 1 :]))]
    return [" ".join(dropwhile(_ARTICLES.__contains__, text[:-1])) + f" {text[-1]}" for text in texts if text]


def _shaped(tree: Node) -> tuple[tuple[Any, ...], Node]:
    """Returns the brackets of a tuple or the lengths of a matrix' rows, with the number of members; and the members."""
    if tree[0] == "matrix":
        return tuple(map(len, tree[1:])), tuple(chain(*tree[1:]))
    start = 3 if tree[0] == "group" else 1
    return (*tree[1:start], len(tree)), tree[start:]


def _clock(tree: Node) -> tuple[str, tuple[Fraction, ...]]:
    """Returns `am`, `pm` or nothing, with hours, minutes and seconds: `17:00` is 5 p.m.; no hours for other trees."""
    if tree[0] == "time":
        return tree[1], tree[2:]
    if tree[0] != "ratio":
        return "", ()
    hours, *minutes = [literal(child) or Fraction() for child in tree[1:]]
    is_afternoon = 13 <= hours <= 23
    return "pm" * is_afternoon, (hours - 12 * is_afternoon, *[*minutes, Fraction()][:2])


def _rows(tree: Node) -> list[tuple[Node, Span]]:
    """Returns the rows of a function by cases, each with its set of numbers; `otherwise` is what remains."""
    spans = [span_of(row[-1]) for row in tree[1:]]
    named_spans = [span for span in spans if span]
    otherwise = reduce(minus, named_spans, LINE)
    return [(row[0], span or otherwise) for row, span in zip(tree[1:], spans, strict=True)]


# ----- relations and spellings


def _oriented(chain: Node) -> tuple[tuple[str, ...], tuple[Node, ...]] | None:
    """Returns the chain with all inequalities in one direction; None if they have no common direction."""
    if chain[0] != "chain" or not chain[1]:
        return None
    _, operators, operands = chain
    if {">", "ge"} & {*operators}:
        operators = tuple(FLIPPED.get(operator, operator) for operator in operators[::-1])
        operands = operands[::-1]
    return None if {">", "ge"} & {*operators} else (operators, operands)


def _bare_text(text: str) -> str:
    """Returns the text without its layout."""
    return "".join(c for c in text.replace(r"\text", "") if not c.isspace() and c not in "{}$\\,;!")


def _spelling(text: str) -> tuple[str, ...]:
    """Returns the tokens of a text; none if it has none, or open braces."""
    is_closed = text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    try:
        return tuple(token.text for token in tokenize(text)) if is_closed else ()
    except Unreadable:
        return ()
