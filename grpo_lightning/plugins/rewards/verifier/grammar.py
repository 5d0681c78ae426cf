"""Reads the one claim of an answer: values and relations with their units. What the grammar does not know is none."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any

from grpo_lightning.plugins.rewards.verifier.number_words import in_digits
from grpo_lightning.plugins.rewards.verifier.tokens import SHORT, Token, Unreadable, tokenize
from grpo_lightning.plugins.rewards.verifier.units import CURRENCIES, TEMPERATURES, TIMES, UNITS, Unit, product_of
from grpo_lightning.plugins.rewards.verifier.words import BELOW_100, MONTHS, SCALES, changes, word_set

Node = tuple[Any, ...]
"""A tree: the kind of node, then its children. Equal trees have equal meaning; see `_Parser` for the kinds."""

per_tree = lru_cache(maxsize=1 << 13)
"""Remembers the results of a function for the latest trees."""
MAX_TOKENS, MAX_DEPTH = 500, 25
RELATIONS = word_set(
    "= < > le ge ne approx in equiv subset subseteq to sim mapsto propto notin parallel perp supset cong"
)
CHOICES = "ABCDEFGHIJ"
_CONDITIONS = word_set("for where when with provided if given assuming")
_QUANTIFIERS = word_set("all any every some each is are an integer integers constant arbitrary real number numbers")
_PHRASES = re.compile(
    r"(?P<all>all real(?:s| numbers))|(?P<infinite>infinity|infinite(?:ly many)?(?: real)?(?: solutions)?)"
    r"|(?P<dne>dne|undefined|.*does not exist)|(?P<none>none|(?:the )?(?:empty|null) set|(?:there (?:is|are) )?"
    r"no (?:such )?(?:real |valid |possible )?(?:solutions?|values?|roots?|numbers?)(?: exists?)?)"
)
_MEANINGS: dict[str | None, Node] = {
    "all": ("numbers", "R"),
    "infinite": ("constant", "inf"),
    "dne": ("words", "dne"),
    "none": ("set",),
}
_OPENING = word_set("= : , approx therefore implies to Rightarrow Longrightarrow")
"""Marks that say nothing before an answer."""
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
_END = Token("end", "")
_NESTING = dict.fromkeys(word_set(r"( [ { \{"), 1) | dict.fromkeys(word_set(r") ] } \}"), -1)
_OVER, _UNION, _RATIO, _SUM, _PRODUCT = range(5)


def _joined(kind: str) -> Callable[[Node, Node], Node]:
    """Builds `a + b + c` as one node."""
    return lambda a, b: (kind, *(a[1:] if a[0] == kind else [a]), b)


_add = _joined("add")


def number_node(value: Fraction | int) -> Node:
    """Returns the node of a number that is written without a decimal point."""
    return ("number", Fraction(value), None)


def signed(sign: str, node: Node) -> Node:
    """Returns the node with a sign before it."""
    if sign == "-":
        is_positive = node[0] == "number" and node[1] >= 0
        return ("number", -node[1], node[2]) if is_positive else ("neg", node)
    return ("pm", 1 if sign == "pm" else -1, node) if sign in ("pm", "mp") else node


def _pair(*kind: str) -> Callable[[Node, Node], Node]:
    """Builds a node of two children."""
    return lambda a, b: (*kind, a, b)


def _term(sign: str) -> Callable[[Node, Node], Node]:
    """Builds a sum with one more term, which has this sign."""
    return lambda a, b: _add(a, signed(sign, b))


_INFIX: dict[str, tuple[int, Callable[[Node, Node], Node]]] = {
    "over": (_OVER, _pair("div")),
    "choose": (_OVER, _pair("call", "binom")),
    "cup": (_UNION, _pair("union")),
    "cap": (_UNION, _pair("meet")),
    "setminus": (_UNION, _pair("minus")),
    ":": (_RATIO, _joined("ratio")),
    **{sign: (_SUM, _term(sign)) for sign in ("+", "-", "pm", "mp")},
    "*": (_PRODUCT, _pair("mul")),
    "/": (_PRODUCT, _pair("div")),
    **{name: (_PRODUCT, _pair("call", "mod")) for name in ("mod", "bmod")},
}
"""The precedence of each operator, and the function that builds its node."""
_AROUND: dict[str, tuple[str, tuple[str, ...]]] = {
    "|": ("|", ("abs",)),
    r"\|": (r"\|", ("call", "norm")),
    "lfloor": ("rfloor", ("call", "floor")),
    "lceil": ("rceil", ("call", "ceil")),
}
"""The closing bracket of each bracket that is a function, and the beginning of its node."""
_COMMANDS: dict[str, Node] = {"frac": ("div",), "binom": ("call", "binom")}
"""The beginnings of the nodes of commands with two arguments."""
_CONSTANTS: dict[str, Node] = {"infty": ("constant", "inf"), "emptyset": ("set",), "ldots": ("dots",)}
_ACCENTS = word_set("overline vec hat dot ddot tilde angle triangle measuredangle")
_FACTORS = word_set("sqrt lfloor lceil infty ( {").union(_COMMANDS, _ACCENTS, ["begin pmatrix", "begin bmatrix"])
"""Tokens that begin a factor of a product without a sign, beside numbers and symbols."""
_ROWS = word_set("pmatrix bmatrix matrix array vmatrix Bmatrix smallmatrix cases")


@dataclass(frozen=True, slots=True)
class Item:
    """One statement of a claim: a value or a relation, with its unit."""

    chain: Node
    """`("chain", operators, operands)`: `x = 3` has one operator and two operands, `3` none and one."""
    unit: Unit = ()
    """The unit, if it is in the table."""
    has_words: bool = False
    """Whether other words stand behind the value: `3 cookies`, `3 left`."""
    counts: bool = False
    """Whether these words name what is counted: `3 cookies`, not `3 left`."""

    @property
    def operators(self) -> tuple[str, ...]:
        """The relations between the operands."""
        return self.chain[1]

    @property
    def operands(self) -> tuple[Node, ...]:
        """The sides of the relations; one if there is no relation."""
        return self.chain[2]

    @property
    def value(self) -> Node:
        """The last operand."""
        return self.chain[2][-1]


@dataclass(frozen=True, slots=True)
class Claim:
    """The meaning of an answer: one item or several."""

    items: tuple[Item, ...]
    """The statements, one or more."""
    joins: frozenset[str] = frozenset()
    """The separators between the items: `,`, `;`, `and`, `or`; `where` before a condition; `trailing` at the end."""


@lru_cache(maxsize=1 << 14)
def read_claim(text: str, question_words: frozenset[str] = frozenset(), brackets: bool = True) -> Claim:
    """Returns the claim of an answer. Raises `Unreadable` if it is none or more than one.

    The question's words may follow a number because the question has them. `brackets` is as for `tokenize`.
    """
    return parse(in_digits(tokenize(text, brackets)), question_words)


def parse(tokens: list[Token], question_words: frozenset[str] = frozenset()) -> Claim:
    """Returns the claim of tokens, as `read_claim` does."""
    if len(tokens) > MAX_TOKENS:
        raise Unreadable("too long")

    # Punctuation at the end says nothing, unless it is a factorial; nor do some marks before the answer.
    while tokens and tokens[-1].kind == "mark" and tokens[-1].text in (".", ",", ";", r"\\", "!"):
        if tokens[-1].text == "!" and not tokens[-1].spaced and tokens[-2:-1] and tokens[-2].kind != "word":
            break
        tokens = tokens[:-1]
    while tokens and tokens[0].kind in ("mark", "command") and tokens[0].text in _OPENING:
        tokens = tokens[1:]
    return _Parser(tokens, question_words).claim()


class _Parser:
    """Parses the tokens of a claim.

    The kinds of nodes, each with the names of its children:
    number value decimals · symbol name · constant name · add · neg · mul · div · pow ·
    root degree radicand · call name arguments · apply name arguments · fact · abs · percent · degree · pm sign ·
    group opening closing items · set · builder body conditions · matrix rows · cases rows · ratio · base digits base ·
    time half hours minutes · words · dots · chain operators operands · union · minus · meet · numbers name ·
    mod value modulus · named text · choice letter claim.
    """

    def __init__(self, tokens: list[Token], question_words: frozenset[str]) -> None:
        self.tokens = tokens
        self.question_words = question_words
        self.position = 0
        self.depth = 0
        self.stops: tuple[str, ...] = ()
        """Marks that end an expression: stops of the brackets around it."""

    # ----- tokens

    @property
    def next(self) -> Token:
        return self.peek(0)

    def peek(self, offset: int) -> Token:
        return self.tokens[self.position + offset] if 0 <= self.position + offset < len(self.tokens) else _END

    def texts(self, count: int) -> list[str]:
        return [self.peek(offset).text for offset in range(count)]

    def advance(self) -> str:
        if self.next is _END:
            raise Unreadable("it ends too early")
        self.position += 1
        return self.tokens[self.position - 1].text

    def take(self, *texts: str) -> str:
        is_mark = self.next.kind not in ("word", "symbol", "number")
        return self.advance() if is_mark and self.next.text in texts else ""

    def take_word(self, *texts: str) -> str:
        return self.advance() if self.next.kind == "word" and self.next.text.casefold() in texts else ""

    def take_all(self, *texts: str) -> bool:
        """Takes these texts, if all of them come next."""
        is_next = self.texts(len(texts)) == [*texts]
        self.position += len(texts) * is_next
        return is_next

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"expected {text}, found {self.next.text or 'the end'}")

    def matching(self, start: int) -> int:
        """Returns the index of the bracket that closes the one at `start`."""
        depth = 0
        for index in range(start, len(self.tokens)):
            depth += _NESTING.get(self.tokens[index].text, 0)
            if depth == 0:
                return index
        raise Unreadable("an open bracket")

    def group_text(self) -> str:
        """Takes a group in braces, or one token; returns its text without braces."""
        start = self.position
        self.position = (self.matching(start) if self.next.text == "{" else start) + 1
        return "".join(token.text for token in self.tokens[start : self.position] if token.text not in ("{", "}"))

    # ----- claims

    def claim(self) -> Claim:
        items, joins = self.items()
        if self.next.kind != "end":
            raise Unreadable(f"what does {self.next.text!r} mean here?")
        return Claim(tuple(items), frozenset(joins))

    def items(self) -> tuple[list[Item], set[str]]:
        items = [self.item()]
        joins = set[str]()
        while True:
            separators = [*iter(lambda: self.take(",", ";", "and", "or"), "")]
            if not separators and items[-1].unit and self.next.kind == "number":
                separators = ["and"]  # `2 hours 30 minutes`
            if self.opens_condition():
                joins.add("where")
                items.append(self.condition())
            elif not separators or self.next.text in ("", ")", "]", r"\}", "}"):
                return items, joins | ({"trailing"} if separators else set())
            else:
                joins.add("or" if "or" in separators else "and" if "and" in separators else separators[0])
                items.append(self.item())

    def opens_condition(self) -> bool:
        r"""Tells whether `where x \ne 1`, `for integer n`, `k an integer` or `(x \ne 1)` begins here."""
        if self.next.text == "(" and self.position:
            inside = self.tokens[self.position + 1 : self.matching(self.position)]
            return any(token.text in ("ne", "in") for token in inside) and inside[0].kind == "symbol"
        next_text = self.peek(1).text
        is_named = (
            self.peek(-1).text == "," and len(self.next.text) == 1 and next_text in ("is", "an", "any", "integer")
        )
        is_word = self.next.kind == "word" and self.next.text in _CONDITIONS
        return is_named or (is_word and (len(next_text) == 1 or next_text in _QUANTIFIERS))

    def condition(self) -> Item:
        r"""Returns the condition that begins here: `n \in \mathbb Z` for `for integer n`."""
        if self.take("("):
            item = self.item()
            self.expect(")")
            return item
        self.position += self.next.text in _CONDITIONS
        start = self.position
        texts = [text for text in self.phrase("word", "symbol") if text not in ("a", "A")]
        names = [text for text in texts if len(text) == 1]
        words = {text.casefold() for text in texts if len(text) > 1}
        if len(names) == 1 and self.next.text in ("", ")", r"\}") and not words - _QUANTIFIERS:
            numbers = "Z" if words & {"integer", "integers"} else "R"
            return Item(("chain", ("in",), (("symbol", names[0]), ("numbers", numbers))))
        self.position = start
        return self.item()

    def phrase(self, *kinds: str) -> list[str]:
        """Takes all tokens of these kinds that come next."""
        start = self.position
        while self.next.kind in kinds:
            self.position += 1
        return [token.text for token in self.tokens[start : self.position]]

    def item(self) -> Item:
        """Takes an item: a choice, words, or values and the relations between them, with a unit."""
        if choice := self.choice():
            return Item(("chain", (), (choice,)))

        # The operands and the relations between them. An article before a noun is skipped.
        currency = self.currency()
        if self.next.text in ("a", "A", "an") and self.peek(1).kind == "word" and len(self.peek(1).text) > 2:
            self.position += 1
        operators: list[str] = []
        operands = [self.operand()]
        while operands[0][0] != "words" and (relation := self.take(*RELATIONS.difference(self.stops))):
            operators.append(relation)
            currency = currency or self.currency()
            operands.append(self.operand())

        # Three spellings of a remainder: `2 \pmod 7`, `\equiv 2 \bmod 7`, `2 (mod 7)`.
        if self.take("pmod"):
            operands[-1] = ("mod", operands[-1], self.argument())
        elif operators[-1:] == ["equiv"] and operands[-1][:2] == ("call", "mod"):
            operands[-1] = operands[-1][1:]
        elif self.take_all("(", "mod") or self.take_all("(", "bmod"):
            operands[-1] = ("mod", operands[-1], self.expression())
            self.expect(")")
        if operands[-1][0] == "words" and operands[0][0] == "words":
            return Item(("chain", (), (operands[0],)))

        # The unit of the last operand, whose scale (`million`) belongs to the number.
        scale, unit, words = self.unit(currency)
        value = operands[-1]
        if value[0] == "degree" and len(unit) == 1 and unit[0][0] in TEMPERATURES:
            operands[-1], unit = value[1], ((TEMPERATURES[unit[0][0]], 1),)
        if scale != 1:
            is_number = value[0] == "number"
            operands[-1] = number_node(value[1] * scale) if is_number else ("mul", value, number_node(scale))
        return Item(("chain", tuple(operators), tuple(operands)), unit, words != "", words == "things")

    def operand(self) -> Node:
        """Takes an operand of a relation: words, a name, an expression, or a time."""
        start = 1
        while self.peek(start).text in ("st", "nd", "rd", "th", "of"):
            start += 1
        is_date = self.next.kind == "number" and self.peek(start).text.casefold() in MONTHS
        if is_date or (self.next.kind == "word" and not self.is_operand_word()):
            texts = [self.advance(), *self.phrase("word", "symbol", "number", "command")]
            return _meaning(" ".join(texts)) or ("words", *texts)
        node = self.name() or self.expression()
        node = _meaning(node[1]) or node if node[0] == "symbol" else node
        is_clock = node[0] == "ratio" or (node[0] == "number" and node[1] <= 12 and node[1].denominator == 1)
        if is_clock and (half := self.take_word("am", "pm")):
            children = node[1:] if node[0] == "ratio" else (node,)
            return ("time", half, *(*(child[1] for child in children), Fraction(), Fraction())[:3])
        return node

    def name(self) -> Node | None:
        r"""Takes the left side of `P(X = 2) =` or `\int_0^1 x\,dx =`: a symbol applied to any group, or an operator."""
        # The side goes up to the next equals sign outside of brackets.
        end = depth = 0
        while depth or self.peek(end).text not in ("=", "approx"):
            depth += _NESTING.get(self.peek(end).text, 0)
            if self.peek(end).kind in ("end", "join"):
                return None
            end += 1
        side = self.tokens[self.position : self.position + end]
        texts = self.texts(end)

        # `f \circ g`, an operator, or a letter with a script, applied to one group that is the remaining side.
        opening = texts.index("(") if "(" in texts else 0
        is_composed = any(a.kind == "symbol" and b.text == "circ" for a, b in pairwise(side))
        is_operator = texts[:1] in (["sum"], ["prod"], ["int"], ["lim"], ["nabla"])
        is_operator |= texts[:3] in (["frac", "{", "d"], ["frac", "{", "partial"])
        is_letter = bool(side) and (side[0].kind in ("symbol", "word") or texts[0] in ("mathbb P", "mathbb E", "Pr"))
        is_script = opening == 1 or (1 < opening < 9 and texts[1] in ("'", "_", "^"))
        is_whole = opening > 0 and self.matching(self.position + opening) == self.position + end - 1
        if is_composed or is_operator or (is_letter and is_script and is_whole):
            self.position += end
            return ("named", "".join(text for text in texts if text not in ("{", "}")))
        return None

    def choice(self) -> Node | None:
        """Returns the choice that begins here, a letter alone or before its text: `(C)`, `C.`, `(C) 12`; else None."""
        if len(self.peek(1).text) == 1 or self.peek(2).text == ")":
            self.take_word("choice", "option")
        texts = self.texts(3)
        end = 3 if texts[0] == "(" and texts[2] == ")" else 2 if texts[1] in (")", ".", ":") else 0
        letter = texts[end == 3]
        next_token = self.peek(end)
        if not end or len(letter) != 1 or letter not in CHOICES:
            return None
        if next_token.text in ("", ",", ";", "and", "or", ")"):
            self.position += end
            return ("symbol", letter)
        is_text = next_token.kind in ("number", "word", "symbol") or next_token.text in ("$", r"\{", "frac", "sqrt")
        if self.position or not is_text:
            return None
        content = _Parser(self.tokens[end:], self.question_words).claim()
        self.position = len(self.tokens)
        if len(content.items) > 1:
            raise Unreadable("a second claim")
        return ("choice", letter, content)

    # ----- units

    def currency(self) -> str:
        """Takes a currency before a number, as `$` or `USD`; returns it, or nothing."""
        name = CURRENCIES.get(self.next.text, "")
        self.position += bool(name)
        while name and self.take(".", "$"):
            pass
        return name

    def unit(self, sign: str = "") -> tuple[int, Unit, str]:
        """Takes the unit after a value, before which the currency `sign` may stand.

        Returns its scale, the unit, and `words` or `things` for other words: `3 left`, `3 cookies`.
        """
        scale = 1
        while self.next.kind == "word" and self.next.text in SCALES and f"{self.next.text}s" not in self.question_words:
            scale *= SCALES[self.advance()]
        currency = self.currency()
        factors: dict[str, int] = {currency: 1} if currency else {}
        self.unit_product(factors, 1)
        if self.take("/") and not (factors or sign):
            self.unit_product(factors, -1)
        phrase: list[str] = []
        while (self.next.kind in ("word", "symbol") and not self.opens_condition()) or (
            self.next.text in ("in", "/") and phrase
        ):
            phrase.append(self.advance())
        if self.next.kind == "number" and phrase[-2:] == ["out", "of"]:
            self.position += 1
        is_letter = any(len(b) == 1 and b not in "aAI/" and a not in ("of", "/") for a, b in pairwise(["", *phrase]))
        if is_letter or changes(phrase, self.question_words):
            raise Unreadable(f"{' '.join(phrase)!r} is no unit")
        unit = _sorted(factors) or ((sign, 1),) * bool(sign)
        is_thing = any(len(word) > 3 and word.endswith("s") for word in phrase[:3])
        return scale, unit, "things" if is_thing else "words" if phrase else ""

    def unit_product(self, factors: dict[str, int], sign: int) -> bool:
        """Adds units and their powers to `factors`, as `kg`, `m/s^2`, `J/(mol K)`; returns whether it found any."""
        is_unit = False
        while True:
            start = self.position
            power = sign * _POWERS.get(self.take_word("square", "sq", "cubic"), 1)
            self.take(".") if is_unit or abs(power) > 1 else None
            token = self.next
            name = UNITS.get(token.text) or UNITS.get(token.text.casefold())
            is_inside = is_unit and self.peek(-1).kind == "word" and (token.text in SHORT or name in TIMES)
            if is_inside or (token.text == "in" and self.peek(1).kind == "word"):
                return is_unit  # `5 litres in total`, `5 litres every day`, `$5 in total`
            if not is_unit and self.take("frac"):  # `\frac{m}{s}`
                for power in (sign, -sign):
                    self.expect("{")
                    self.unit_product(factors, power)
                    self.expect("}")
            elif name:
                self.position += 1
                self.take(".")
                power *= self.unit_power()
                for base, times in product_of(name):
                    factors[base] = factors.get(base, 0) + power * times
            elif not (
                is_unit
                and (
                    self.take("*") or ((self.take("/") or self.take_word("per")) and self.unit_product(factors, -sign))
                )
            ):
                self.position = start
                return is_unit
            is_unit = True

    def names_unit(self, token: Token) -> bool:
        """Tells whether a token is a unit: a word, or a letter that is no variable of the question."""
        return token.text in UNITS and (len(token.text) > 1 or token.text not in self.question_words)

    def opens_unit(self) -> bool:
        """Tells whether letters behind a number, and a space, are its unit, up to the end of the item: `7 m/s`."""
        token = self.next
        previous = self.peek(-1)
        if previous.text == "circ":
            return token.text in ("C", "F")
        is_text = self.texts(2) == ["frac", "{"] and self.names_unit(self.peek(2))
        if previous.kind != "number" or not (
            is_text or (token.spaced and (self.question_words or self.peek(1).text == "/"))
        ):
            return False
        item_tokens = [*takewhile(lambda token: token.text not in (",", "or", "and"), self.tokens[self.position :])]
        has_no_factor = all(
            self.names_unit(token) or token.kind == "number" or token.text in tuple("/^{}-*")
            for token in item_tokens[1:]
        )
        return has_no_factor and (self.names_unit(token) or is_text)

    def unit_power(self) -> int:
        word = self.take_word("squared", "cubed")
        text = str(_POWERS[word]) if word else self.group_text() if self.take("^") else "1"
        if not text.removeprefix("-").isdigit() or len(text) > 2:
            raise Unreadable("no power of a unit")
        return int(text)

    # ----- brackets and operators

    @contextmanager
    def inside(self, closing: str = "", *stops: str) -> Iterator[None]:
        """Reads inside of brackets, with their own stops, and then what closes them."""
        outer_stops, self.stops = self.stops, stops
        yield
        self.stops = outer_stops
        if closing:
            self.expect(closing)

    def expression(self, floor: int = 0) -> Node:
        """Returns an expression whose operators have at least the precedence `floor`."""
        if sign := self.take("+", "-", "pm", "mp"):
            if self.next.text in ("+", "-") or floor == _SUM + 1:
                raise Unreadable("two signs")
            left = signed(sign, self.expression(max(floor, _PRODUCT)))
        else:
            left = self.factor()
        while (operator := self.operator()) is not None:
            precedence, build = _INFIX[operator or "*"]
            if precedence < floor:
                break
            if operator:
                self.position += 1
                left = build(left, self.expression(precedence + 1))
            else:
                left = self.beside(left)
        return left

    def operator(self) -> str | None:
        """Returns the operator that comes next, empty between factors without a sign; None if there is none."""
        token = self.next
        next_token = self.peek(1)
        if token.kind == "word":
            return ":" if token.text == "to" and next_token.kind == "number" else None
        if token.text in self.stops or (token.text == "/" and next_token.kind == "word" and len(next_token.text) > 1):
            return None
        if token.text in _INFIX and token.kind != "symbol":
            return token.text
        return "" if self.starts_factor() else None

    def starts_factor(self) -> bool:
        """Tells whether a factor of a product without a sign begins here."""
        token = self.next
        next_token = self.peek(1)
        if token.kind in ("number", "symbol", "function") or token.text == "frac":
            return not self.opens_unit()
        if token.text == "|":
            return "|" not in self.stops
        is_words = next_token.text in ("mod", "bmod") or (next_token.kind == "word" and len(next_token.text) != 1)
        if token.text == "(" and (is_words or self.opens_condition()):
            return False
        return token.kind not in ("word", "join") and token.text in _FACTORS

    def beside(self, left: Node) -> Node:
        r"""Returns a product without a sign, or a mixed number: `2x`, `2\frac12`."""
        token = self.next
        is_shown = token.text == "(" and any(token.text == "=" for token in self.tokens[self.position :])
        is_number = token.kind == "number"
        right = self.factor()
        if token.text == "frac" and _is_mixed(left, right):
            return number_node(left[1] + right[1][1] / right[2][1])
        is_product = left[0] != "number" and (not is_number or left == ("constant", "i"))
        if right[0] == "number" and not is_shown and not is_product:
            raise Unreadable("two numbers side by side")
        return ("mul", left, right)

    def factor(self) -> Node:
        """Returns an atom with what follows it: powers, factorials, signs, primes, a base."""
        node = self.atom()
        while True:
            is_power = self.take("^")
            if self.take("circ") or (is_power and (self.take_word("o") or self.take_all("{", "circ", "}"))):
                node = ("degree", node)
            elif is_power:
                node = ("pow", node, ("neg", self.atom()) if self.take("-") else self.argument(whole_numbers=True))
            elif self.take("!"):
                node = ("fact", node)
            elif self.take("%"):
                node = ("percent", node)
            elif node[0] in ("symbol", "apply") and self.take("'"):
                node = (node[0], node[1] + "'", *node[2:])
            elif node[0] == "number" and self.take("_"):
                node = self.based(node)
            else:
                return node

    def based(self, node: Node) -> Node:
        """Returns a number with its base: `204_5`, `204_{five}`."""
        text = self.group_text().strip("()")
        base = int(text) if text.isdigit() and len(text) < 3 else BELOW_100.get(text, 0)
        if base < 2:
            raise Unreadable("no base")
        return ("base", str(node[1]), base)

    # ----- atoms

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        token = self.next
        if token.kind == "number":
            node = self.number()
        elif token.kind == "function":
            node = self.function()
        elif token.kind == "symbol" or self.is_operand_word():
            node = self.symbol()
        elif token.kind == "environment":
            node = self.environment()
        elif token.kind in ("word", "join", "end"):
            raise Unreadable(f"{token.text or 'the end'!r} where a value should be")
        else:
            self.position += 1
            node = self.command(token.text)
        self.depth -= 1
        return node

    def is_operand_word(self) -> bool:
        """Tells whether a word is a symbol set in upright letters."""
        token = self.next
        return token.kind == "word" and token.text.isascii() and (len(token.text) == 1 or token.text.isupper())

    def command(self, text: str) -> Node:
        """Returns the node of a bracket or a command, which has been taken."""
        if text in ("(", "[", "]"):
            return self.group(text)
        if text in ("{", r"\{"):
            return self.set(text.replace("{", "}"))
        if text in _AROUND:
            closing, kind = _AROUND[text]
            with self.inside(closing, *self.stops, closing):
                return (*kind, self.expression())
        if text in _COMMANDS:
            return (*_COMMANDS[text], self.argument(), self.argument())
        if text == "sqrt":
            degree = number_node(2)
            if self.take("["):
                degree = self.expression()
                self.expect("]")
            return ("root", degree, self.argument())
        if text.startswith("mathbb "):
            name = text.removeprefix("mathbb ")
            while mark := self.take("^", "_"):
                name += mark + self.group_text()
            return ("numbers", name)
        if text in _ACCENTS:
            letters = "".join(self.phrase("symbol"))
            return self.subscripts(f"{text} {letters or self.group_text()}")
        if text not in _CONSTANTS:
            raise Unreadable(f"what does {text!r} mean here?")
        return _CONSTANTS[text]

    def argument(self, whole_numbers: bool = False) -> Node:
        """Returns the argument as TeX reads it: a group in braces or one character."""
        token = self.next
        if self.take("{"):
            with self.inside("}"):
                return self.expression()
        if token.kind == "number" and not whole_numbers and len(token.text) > 1:
            if not token.text[0].isdigit():
                raise Unreadable("no argument")
            self.tokens[self.position] = Token("number", token.text[1:])
            return number_node(int(token.text[0]))
        return self.atom()

    def number(self) -> Node:
        """Returns a number: an integer, a decimal, a repeating one, a mixed one."""
        text = self.advance()
        if "(" in text:
            integer_digits, _, fraction_digits = text.partition(".")
            fixed, _, repeated = fraction_digits.rstrip(")").partition("(")
            period = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
            return number_node(Fraction(f"{integer_digits}.{fixed}0") + period)
        mantissa = text.casefold().partition("e")[0]
        if len(mantissa) > 200:
            raise Unreadable("too many digits")
        decimals = len(mantissa.partition(".")[2]) if "." in mantissa else None
        top, slash, bottom = (self.peek(offset) for offset in range(3))
        is_mixed = decimals is None and top.spaced and slash.text == "/" and (top.text + bottom.text).isdigit()
        if is_mixed and 0 < int(top.text or 0) < int(bottom.text or 0):
            self.position += 3
            return number_node(Fraction(text) + Fraction(int(top.text), int(bottom.text)))
        return ("number", Fraction(text), decimals)

    def symbol(self) -> Node:
        name = self.advance()
        if name in ("e", "pi", "i") and self.next.text != "_":
            return ("constant", name)
        node = self.subscripts(name)
        is_applied = self.next.text == "(" and name in tuple("fghFGH")
        return ("apply", node[1], *self.arguments()) if is_applied else node

    def subscripts(self, name: str) -> Node:
        """Returns a symbol with its subscript: `a_{n}` is `a_n`."""
        while self.take("_"):
            name += "_" + self.group_text()
        return ("symbol", name)

    def function(self) -> Node:
        r"""Returns a function with its power, its base and its arguments: `\sin^2 x`, `\log_2 8`, `\ln(x)^2`."""
        name = self.advance()
        power: Node | None = None
        below: tuple[Node, ...] = ()
        while mark := self.take("^", "_"):
            if mark == "_":
                below = (self.argument(whole_numbers=True),)
            elif len(name) == 3 and name[0] in "sct" and (self.take_all("{", "-", "1", "}") or self.take_all("-", "1")):
                name = "arc" + name
            else:
                power = self.argument()
        if self.next.text == "(":
            arguments = self.arguments()
        elif self.starts_factor():
            node = self.factor()
            while self.starts_factor() and self.next.kind != "function":
                node = ("mul", node, self.factor())
            arguments = [node]
        else:
            raise Unreadable(f"{name} of nothing")
        called: Node = ("call", name + "_" * len(below), *below, *arguments)
        if name == "exp":
            called = ("pow", ("constant", "e"), *arguments)
        return called if power is None else ("pow", called, power)

    # ----- brackets

    def values(self) -> tuple[list[Node], set[str]]:
        """Returns the values of items in brackets, which have no units, and their separators; a relation is a chain."""
        items, joins = self.items()
        if any(item.unit or item.has_words for item in items):
            raise Unreadable("a unit inside a formula")
        return [item.chain if item.operators else item.value for item in items], joins

    def arguments(self) -> list[Node]:
        """Returns the arguments after a function's name: `(a, b)`."""
        self.expect("(")
        with self.inside(")"):
            values, _ = self.values()
        return values

    def group(self, opening: str) -> Node:
        with self.inside():
            values, joins = self.values()
        closing = self.take(")", "]", "[")
        if not closing or (opening == "(" and closing == "[") or joins & {"or", "and", "trailing"}:
            raise Unreadable("no group")
        # `]0,2[` is `(0,2)`.
        opening = opening.replace("]", "(")
        closing = closing.replace("[", ")")
        is_bracket = (opening, closing) == ("(", ")") and values[0][0] != "chain"
        if len(values) == 1 and (values[0][0] == "matrix" or is_bracket):
            return values[0]
        return ("group", opening, closing, *values)

    def set(self, closing: str) -> Node:
        r"""Returns a set in braces, with or without a condition; what stands alone in bare braces is only grouped."""
        if self.take(closing):
            return ("set",)
        with self.inside("", "|", ":", "mid"):
            values, joins = self.values()
        if self.take("|", ":", "mid"):
            with self.inside(closing):
                conditions, condition_joins = self.values()
            if len(values) > 1 or ("or" in condition_joins and len(condition_joins) > 1):
                raise Unreadable("a set of more than one kind")
            return ("builder", values[0], *([("either", *conditions)] if "or" in condition_joins else conditions))
        self.expect(closing)
        if joins & {"or", "and", "trailing"}:
            raise Unreadable("words in brackets")
        return values[0] if closing == "}" and len(values) == 1 else ("set", *values)

    def environment(self) -> Node:
        name = self.advance().removeprefix("begin ")
        end, depth = self.position, 1
        while depth and end < len(self.tokens):
            depth += _nesting(self.tokens[end])
            end += 1
        rows = [_split(row, "&") for row in _split(self.tokens[self.position : end - 1], r"\\") if row]
        self.position = end
        if depth or not rows or name not in _ROWS:
            raise Unreadable(f"an environment {name!r}")
        cells = [tuple(self.cell(cell) for cell in row if cell or name != "cases") for row in rows]
        node = ("cases" if name == "cases" else "matrix", *cells)
        return ("call", "det", node) if name == "vmatrix" else node

    def cell(self, tokens: list[Token]) -> Node:
        while tokens and (tokens[-1].text in (",", ".") or tokens[0].text in ("if", "for", "when")):
            tokens = tokens[:-1] if tokens[-1].text in (",", ".") else tokens[1:]
        parser = type(self)(tokens, self.question_words)
        values, _ = parser.values()
        if len(values) != 1 or parser.next is not _END:
            raise Unreadable("a cell with more than one value")
        return values[0]


def _meaning(text: str) -> Node | None:
    """Returns the value that words stand for: the empty set of `no solutions`; None for others."""
    match = _PHRASES.fullmatch(text.casefold().rstrip("."))
    return _MEANINGS[match.lastgroup] if match else None


def read_unit(text: str) -> tuple[Unit, str, str]:
    """Returns the unit that a text begins with, its last token and the one behind it; no unit if there is none."""
    parser = _Parser(list(tokenize(rf"\text{{{text}}}")), frozenset())
    factors: dict[str, int] = {}
    parser.unit_product(factors, 1)
    return _sorted(factors), parser.peek(-1).text, parser.next.text


def _sorted(factors: dict[str, int]) -> Unit:
    """Returns the normal form of a product of units; degrees of Celsius are no angles."""
    is_temperature = not {"celsius", "fahrenheit"}.isdisjoint(factors)
    names = (name for name, power in factors.items() if power and not (is_temperature and name == "degree"))
    return tuple((name, factors[name]) for name in sorted(names))


def _nesting(token: Token) -> int:
    return token.text.startswith("begin ") - token.text.startswith("end ")


def _split(tokens: list[Token], separator: str) -> list[list[Token]]:
    """Returns the rows or cells between separators, but for separators of an inner environment."""
    slices: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += _nesting(token)
        if token.text == separator and depth == 0:
            slices.append([])
        else:
            slices[-1].append(token)
    return slices


def _is_mixed(left: Node, right: Node) -> bool:
    r"""Tells whether the two are a mixed number, a whole number and a fraction of whole numbers below 1: `2\frac12`."""
    if left[0] != "number" or left[2] is not None or left[1].denominator > 1 or right[0] != "div":
        return False
    are_integers = all(child[0] == "number" and child[1].denominator == 1 for child in right[1:])
    return are_integers and 0 < right[1][1] < right[2][1]  # any other would be an unfinished sum
