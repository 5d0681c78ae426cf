"""Parses the tokens of an answer into one claim. Text that the grammar does not know is no answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from grpo_lightning.plugins.verifier.number_words import in_digits
from grpo_lightning.plugins.verifier.tokens import Token, Unreadable, tokenize
from grpo_lightning.plugins.verifier.units import CURRENCIES, UNITS, Unit
from grpo_lightning.plugins.verifier.words import BELOW_100, SCALES, changes, word_set

Node = tuple[Any, ...]
"""A tree: the kind of node, then its parts. Equal trees have equal meaning; see `_Parser` for the kinds."""

MAX_TOKENS, MAX_DEPTH = 500, 25
MONTHS = word_set("january february march april may june july august september october november december")
RELATIONS = word_set(
    "= < > le ge ne approx in equiv subset subseteq to sim mapsto propto notin parallel perp supset cong"
)
FUNCTION_LETTERS = frozenset("fghFGH")
_LOGS = ("ln", "log", "lg")
_CONDITIONS = word_set("for where when with provided if given assuming")
_QUANTIFIERS = word_set("all any every some each is are an integer integers constant arbitrary real number numbers")
_AFTER_NO_CHOICE = word_set("/ = ^ * + - ( , ! ' _ < > in no not")
_OPENERS = word_set(
    r"frac sqrt binom lfloor lceil infty overline vec hat dot ddot tilde angle triangle sum prod int lim ( { "
)
_MATRICES = word_set("pmatrix bmatrix matrix array vmatrix Bmatrix smallmatrix")
_MARKS = ("overline", "vec", "hat", "dot", "ddot", "tilde")
_ANGLES = ("angle", "triangle", "measuredangle")
_BIG = ("sum", "prod", "int", "iint", "oint", "lim", "bigcup", "bigcap")
_SETS = {"cup": "union", "cap": "meet", "setminus": "minus"}


@dataclass(frozen=True, slots=True)
class Item:
    """One statement of a claim: a value or a relation, with its unit."""

    chain: Node
    """`("chain", operators, operands)`: `x = 3` has one operator and two operands, `3` none and one."""
    unit: Unit = ()
    """The unit, if it is in the table."""
    names_things: bool = False
    """Whether something is counted: `3 cookies`."""
    counts: bool = False
    """Whether what is counted is named: `3 cookies`, not `3 left`."""
    amounts: tuple[tuple[Node, Unit], ...] = ()
    """The same amount in other units: 1.5 hours of `1.5 hours = 90 minutes`."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The meaning of an answer: one item or several."""

    items: tuple[Item, ...]
    joins: frozenset[str] = frozenset()
    """The separators between the items: `,`, `;`, `and`, `or`; `where` before a condition; `trailing` at the end."""


@lru_cache(maxsize=1 << 14)
def read_claim(text: str, known: frozenset[str] = frozenset(), brackets: bool = True) -> Claim:
    """The claim of an answer.

    Args:
        text: The answer.
        known: Words that may follow a number because the question has them.
        brackets: Whether `3,500` inside brackets is two numbers.

    Raises:
        Unreadable: The text is no claim, or more than one.
    """
    return parse(in_digits(tokenize(text, brackets)), known)


def parse(tokens: list[Token], known: frozenset[str] = frozenset()) -> Claim:
    """The claim of tokens, as `read_claim` finds it."""
    if len(tokens) > MAX_TOKENS:
        raise Unreadable("too long")
    while tokens and tokens[-1].kind == "mark" and tokens[-1].text in (".", ",", ";", r"\\", "!"):
        if tokens[-1].text == "!" and not tokens[-1].spaced and tokens[-2:-1] and tokens[-2].kind != "word":
            break
        tokens = tokens[:-1]
    while tokens and tokens[0].kind in ("mark", "command") and tokens[0].text in ("=", ":", ",", "approx"):
        tokens = tokens[1:]
    return _Parser(tokens, known).claim()


class _Parser:
    """Parses tokens by recursive descent.

    The kinds of nodes, each with the names of its parts:
    number value decimals · symbol name · constant name · add · neg · mul · div · pow ·
    root degree radicand · call name arguments · apply name arguments · fact · abs · percent · degree · pm sign ·
    group opening closing items · set · builder body conditions · matrix rows · cases rows · ratio · base digits base ·
    time half hours minutes · words · dots · chain operators operands · union · minus · meet · numbers name ·
    big name below above body · mod value modulus · marked mark name.
    """

    def __init__(self, tokens: list[Token], known: frozenset[str]) -> None:
        self.tokens, self.known, self.position, self.depth = tokens, known, 0, 0
        self.bars = 0
        self.stops: tuple[str, ...] = ()

    # ----- tokens

    @property
    def next(self) -> Token:
        return self.peek(0)

    def peek(self, offset: int) -> Token:
        return self.tokens[self.position + offset] if 0 <= self.position + offset < len(self.tokens) else _END

    def texts(self, count: int) -> list[str]:
        return [self.peek(offset).text for offset in range(count)]

    def take(self, *texts: str) -> str:
        token = self.next
        if token.text in texts and token.kind in ("mark", "command", "environment", "join"):
            return self.advance()
        return ""

    def take_word(self, *texts: str) -> str:
        return self.advance() if self.next.kind == "word" and self.next.text.casefold() in texts else ""

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"expected {text}, found {self.next.text or 'the end'}")

    def advance(self) -> str:
        if self.next is _END:
            raise Unreadable("it ends too early")
        self.position += 1
        return self.tokens[self.position - 1].text

    def at_end(self) -> bool:
        return self.next is _END or self.next.text in (")", "]", r"\}")

    def matching(self, start: int) -> int:
        """The index of the bracket that closes the one at `start`."""
        depth = 0
        for index in range(start, len(self.tokens)):
            text = self.tokens[index].text
            depth += (text in ("(", "[", "{", r"\{")) - (text in (")", "]", "}", r"\}"))
            if depth == 0:
                return index
        raise Unreadable("an open bracket")

    def group_text(self) -> str:
        """Takes a group in braces, or one token; returns its text without braces."""
        start = self.position
        self.position = (self.matching(start) if self.next.text == "{" else start) + 1
        return "".join(token.text for token in self.tokens[start : self.position] if token.text not in ("{", "}"))

    @contextmanager
    def inside(self, *stops: str, bars: int = 0) -> Iterator[None]:
        """Reads inside of brackets: with its own stops, and no open bar."""
        before = self.bars, self.stops
        self.bars, self.stops = bars, stops
        yield
        self.bars, self.stops = before

    # ----- claims

    def claim(self) -> Claim:
        items, joins = self.items()
        if self.next is not _END:
            raise Unreadable(f"what does {self.next.text!r} mean here?")
        return Claim(tuple(items), frozenset(joins))

    def items(self) -> tuple[list[Item], set[str]]:
        """The items up to a closing bracket or the end, and their separators."""
        items, joins = [self.item()], set[str]()
        while True:
            found: list[str] = []
            while join := self.take(",", ";", "and", "or"):
                found.append(join)
            if self.opens_condition():
                joins.add("where")
                items.append(self.condition())
            elif not found or self.at_end():
                return items, joins | ({"trailing"} if found else set())
            elif "or" in found and self.take_word("about", "approximately", "roughly"):
                _, operators, operands = items[-1].chain
                items[-1] = Item(("chain", (*operators, "approx"), (*operands, self.operand())), items[-1].unit)
            elif found.count(",") > 1:
                raise Unreadable("an empty item in a list")
            else:
                joins.add("or" if "or" in found else "and" if "and" in found else found[0])
                items.append(self.item())

    def opens_condition(self) -> bool:
        r"""Whether `where x \ne 1`, `for integer n`, `k an integer` or `(x \ne 1)` begins here."""
        if self.next.text == "(" and self.position:
            inside = self.tokens[self.position + 1 : self.matching(self.position)]
            return any(token.text in ("ne", "in") for token in inside) and inside[0].kind == "symbol"
        is_letter = len(self.next.text) == 1 and self.next.kind in ("symbol", "word")
        if self.peek(-1).text == "," and is_letter and self.peek(1).text in ("is", "an", "any", "integer"):
            return True
        after = self.peek(1).text
        is_condition = self.next.kind == "word" and self.next.text in _CONDITIONS
        return (is_condition and (len(after) == 1 or after in _QUANTIFIERS)) or self.next.text == "forall"

    def condition(self) -> Item:
        r"""The condition that begins here: `n \in \mathbb Z` for `for integer n`."""
        if self.take("("):
            item = self.item()
            self.expect(")")
            return item
        self.position += self.next.text in _CONDITIONS or self.next.text == "forall"
        start = self.position
        while self.next.kind in ("word", "symbol"):
            self.position += 1
        found = [token.text for token in self.tokens[start : self.position] if token.text not in ("a", "A")]
        names = [text for text in found if len(text) == 1]
        words = {text.casefold() for text in found if len(text) > 1}
        if len(names) == 1 and self.at_end() and not words - _QUANTIFIERS:
            is_whole = bool(words & {"integer", "integers"})
            return Item(("chain", ("in",), (("symbol", names[0]), ("numbers", "Z" if is_whole else "R"))))
        self.position = start
        return self.item()

    def item(self) -> Item:
        choice = self.choice()
        if choice:
            return Item(("chain", (), (choice,)))
        currency = self.currency()
        if self.next.text in ("a", "A", "an") and self.peek(1).kind == "word" and len(self.peek(1).text) > 2:
            self.position += 1
        if self.is_date() or (self.next.kind == "word" and not self.is_operand_word()):
            return Item(("chain", (), (self.words(),)))
        operators: list[str] = []
        operands, amounts = [self.operand()], []
        while True:
            if amount := self.amount(operands[-1], currency):
                amounts.append(amount)
                operands.pop()
                currency = ""
            relation = self.next.text if self.next.kind in ("mark", "command") else ""
            if relation not in RELATIONS or relation in self.stops:
                break
            self.position += 1
            if not amount:
                operators.append(relation)
            currency = currency or self.currency()
            operands.append(self.words() if self.next.kind == "word" and not self.is_operand_word() else self.operand())
        if operators[-1:] == ["equiv"] and operands[-1][:2] == ("call", "mod"):
            operands[-1] = ("mod", *operands[-1][2:])
        if self.take("pmod"):
            operands[-1] = ("mod", operands[-1], self.argument())
        elif self.next.text == "(" and self.peek(1).text in ("mod", "bmod"):
            self.position += 2
            operands[-1] = ("mod", operands[-1], self.operand())
            self.expect(")")
        scale, unit, things = self.unit(currency)
        if scale != 1:
            value = operands[-1]
            is_number = value[0] == "number"
            factor = ("number", Fraction(scale), None)
            operands[-1] = ("number", value[1] * scale, None) if is_number else ("mul", value, factor)
        if unit == (("percent", 1),):
            operands[-1], unit = ("percent", operands[-1]), ()
        if amounts and (len(operators) != len(operands) - 1 or set(operators) - {"="}):
            raise Unreadable("a chain of amounts that is none")
        return Item(("chain", tuple(operators), tuple(operands)), unit, bool(things), things > 1, tuple(amounts))

    def amount(self, value: Node, currency: str) -> tuple[Node, Unit] | None:
        """A value and its unit, if an equals sign follows; else None."""
        start = self.position
        if self.next.kind == "word":
            try:
                _, unit, _ = self.unit()
            except Unreadable:
                unit = ()
            if unit and self.next.text == "=":
                return value, unit
        self.position = start
        return (value, ((currency, 1),)) if currency and self.next.text == "=" else None

    def is_date(self) -> bool:
        """Whether a date begins here: `20 June`, `20th of June`."""
        start = 1
        while self.peek(start).text in ("st", "nd", "rd", "th", "of"):
            start += 1
        return self.next.kind == "number" and self.peek(start).text.casefold() in MONTHS

    def currency(self) -> str:
        """Takes a currency sign before a number; returns the currency, or nothing."""
        return CURRENCIES[self.advance()] if self.next.text in CURRENCIES and self.next.kind == "mark" else ""

    def choice(self) -> Node | None:
        """The choice that begins here, a letter alone or before its text: `(C)`, `C.`, `(C) 12`; else None."""
        if self.next.text.casefold() in ("choice", "option"):
            self.position += 1
            return self.choice() or (("symbol", self.advance()) if len(self.next.text) == 1 else None)
        texts = self.texts(3)
        end = 3 if texts[0] == "(" and texts[2] == ")" else 2 if texts[1] in (")", ".", ":") else 0
        letter = texts[1] if end == 3 else texts[0]
        if not end or len(letter) != 1 or letter not in "ABCDEFGHIJ":
            return None
        after = self.peek(end)
        if after is _END or after.text in (",", ";", "and", "or", ")"):
            if texts[1] == ")" and self.position:
                return None
            self.position += end
            return ("symbol", letter)
        if self.position or (texts[1] == "." and not after.spaced) or after.text in _AFTER_NO_CHOICE:
            return None
        tokens = self.tokens[end:]
        if changes([token.text for token in tokens if token.kind == "word"], self.known):
            raise Unreadable("a choice that is taken back")
        rest = _Parser(tokens, self.known).claim()
        self.position = len(self.tokens)
        if len(rest.items) > 1 or {*rest.items[0].chain[1]} - {"=", "approx"}:
            raise Unreadable("a second claim")
        return ("choice", letter, rest)

    def is_operand_word(self) -> bool:
        """Whether the word is a symbol set in upright letters."""
        token = self.next
        return token.kind == "word" and token.text.isascii() and (len(token.text) == 1 or token.text.isupper())

    def words(self) -> Node:
        """Text that is an answer by itself: `Tuesday`, `June 20`."""
        start = self.position
        while self.next.kind in ("word", "number") or (self.next.kind == "symbol" and self.position > start):
            self.position += 1
        found = [token.text for token in self.tokens[start : self.position]]
        is_line = " ".join(found).casefold() in ("all real numbers", "all reals")
        return ("numbers", "R") if is_line else ("words", *found)

    # ----- units

    def unit(self, sign: str = "") -> tuple[int, Unit, int]:
        """The scale and the unit after a value, and 1 for `left`, 2 for `cookies`. `sign`: the currency before it."""
        scale = 1
        while self.next.kind == "word" and self.next.text in SCALES and f"{self.next.text}s" not in self.known:
            scale *= SCALES[self.advance()]
        factors: dict[str, int] = {}
        if currency := self.currency():
            factors[currency] = 1
        self.unit_product(factors, 1)
        start = self.position
        self.take("/")
        while not self.opens_condition() and (
            self.next.kind in ("word", "symbol") or (self.next.text == "in" and self.next.kind == "command")
        ):
            self.position += 1
        phrase = [token.text for token in self.tokens[start : self.position]]
        if self.next.kind == "number" and phrase[-2:] == ["out", "of"]:
            self.position += 1
        is_letter = any(len(b) == 1 and b not in "aAI/" and a != "of" for a, b in pairwise(["", *phrase]))
        if is_letter or changes(phrase, self.known):
            raise Unreadable(f"{' '.join(phrase)!r} is no unit")
        inside = self.tokens[self.position + 1 : self.matching(self.position)] if self.next.text == "(" else []
        names = [token.text for token in inside if token.kind == "word"]
        if inside and len(names) == len(inside) and not changes(names, self.known):
            self.position += len(inside) + 2
            if names[0] in UNITS and not factors and not phrase:
                factors[UNITS[names[0]]] = 1
            phrase = phrase or names
        unit = tuple(sorted((name, power) for name, power in factors.items() if power)) or ((sign, 1),) * bool(sign)
        is_thing = any(len(w) > 3 and w.endswith("s") and w.casefold() not in UNITS for w in phrase[:3])
        return scale, unit, 0 if not phrase else 2 if is_thing and not factors and not sign else 1

    def unit_product(self, factors: dict[str, int], sign: int) -> bool:
        """Adds units and their powers to `factors`, as `kg`, `m/s^2`, `J/(mol K)`; returns whether it found any."""
        found = False
        while True:
            start = self.position
            square = {"cubic": 3, "square": 2, "sq": 2}.get(self.take_word("square", "sq", "cubic"), 1)
            self.take(".") if found or square > 1 else None
            token = self.next
            name = UNITS.get(token.text) or UNITS.get(token.text.casefold())
            if name and (token.kind == "word" or (token.text == "Omega" and not found)):
                self.position += 1
                self.take(".")
                factors[name] = factors.get(name, 0) + sign * square * self.unit_power()
            elif token.text == "frac" and self.peek(2).kind == "word":
                self.position += 1
                for direction in (1, -1):
                    self.expect("{")
                    if not self.unit_product(factors, sign * direction):
                        raise Unreadable("no unit")
                    self.expect("}")
            elif found and (self.take("/") or self.take_word("per")):
                inner = self.take("(")
                if not self.unit_product(factors, -sign):
                    self.position = start
                    return found
                if inner:
                    self.expect(")")
            elif not (found and self.take("*")):
                self.position = start
                return found
            found = True

    def unit_power(self) -> int:
        if not self.take("^"):
            return 1
        text = self.group_text()
        if not text.removeprefix("-").isdigit() or len(text) > 2:
            raise Unreadable("no power of a unit")
        return int(text)

    # ----- expressions

    def operand(self) -> Node:
        """One operand of a relation: a sum, a ratio, a time, or a union of sets."""
        node = self.name() or self.ratio()
        while operator := self.take(*_SETS):
            node = (_SETS[operator], node, self.ratio())
        return ("div", node, self.operand()) if self.take("over") else node

    def name(self) -> Node | None:
        r"""The left side of `P(X = 2) =` or `(f \circ g)(x) =`: any symbol or group applied to any group."""
        start = end = self.position
        texts = [token.text for token in self.tokens[start:]]
        first = self.tokens[start : start + texts.index("=")] if "=" in texts else []
        composed = any(a.kind == "symbol" and b.text == "circ" for a, b in pairwise(first))
        if (composed or (first and texts[:4] == ["frac", "{", "d", "}"])) and all(t.kind != "join" for t in first):
            self.position += len(first)
            return ("named", "".join(token.text for token in first))
        if self.next.kind not in ("symbol", "word") and self.next.text not in ("mathbb P", "mathbb E", "Pr"):
            return None
        end += 1
        while end < len(self.tokens) and self.tokens[end].text in ("'", "_", "^"):
            is_group = self.tokens[end].text != "'" and self.tokens[end + 1 : end + 2] and texts[end - start + 1] == "{"
            end = self.matching(end + 1) + 1 if is_group else end + (1 if self.tokens[end].text == "'" else 2)
        if end >= len(self.tokens) or self.tokens[end].text != "(":
            return None
        last = self.matching(end) + 1
        if last >= len(self.tokens) or self.tokens[last].text not in ("=", "approx") or last <= end + 2:
            return None
        self.position = last
        return ("named", "".join(text for text in texts[: last - start] if text not in "{}"))

    def ratio(self) -> Node:
        parts = [self.sum()]
        while (":" not in self.stops and self.take(":")) or (self.peek(1).kind == "number" and self.take_word("to")):
            parts.append(self.sum())
        if half := self.take_word("am", "pm"):
            if not all(part[0] == "number" for part in parts):
                raise Unreadable("no time")
            return ("time", half, *(part[1] for part in parts))
        return parts[0] if len(parts) == 1 else ("ratio", *parts)

    def sum(self) -> Node:
        terms: list[Node] = []
        while (sign := self.take("+", "-", "pm", "mp")) or not terms:
            if sign and self.next.text in ("+", "-"):
                raise Unreadable("two signs")
            terms.append(_signed(sign, self.product()))
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Node:
        node = self.factor()
        while True:
            if self.take("*"):
                node = ("mul", node, self.signed_factor())
            elif self.next.text == "/" and not (self.peek(1).kind == "word" and len(self.peek(1).text) > 1):
                self.position += 1
                node = ("div", node, self.signed_factor())
            elif self.next.text in ("mod", "bmod") and self.next.kind in ("function", "command"):
                self.position += 1
                node = ("call", "mod", node, self.factor())
            elif self.starts_factor():
                is_fraction = self.next.text == "frac"
                is_number = self.next.kind == "number" or (self.next.text == "{" and self.peek(1).kind == "number")
                right = self.factor()
                if is_fraction and _is_mixed(node, right):
                    node = ("number", node[1] + right[1][1] / right[2][1], None)
                elif right[0] == "number" and (node[0] == "number" or (is_number and node != ("constant", "i"))):
                    raise Unreadable("two numbers side by side")
                else:
                    node = ("mul", node, right)
            else:
                return node

    def signed_factor(self) -> Node:
        return ("neg", self.factor()) if self.take("-") else self.factor()

    def starts_factor(self) -> bool:
        token, after = self.next, self.peek(1)
        if token.text == "Omega" and self.peek(-1).kind == "number" and after is _END:
            return False
        if token.kind in ("number", "symbol", "function"):
            return True
        if token.kind in ("word", "join"):
            return False
        if token.text == "|":
            return self.bars == 0 and "|" not in self.stops
        if token.text == "frac":
            return not (after.text == "{" and self.peek(2).kind == "word")
        is_words = after.text in ("mod", "bmod") or (after.kind == "word" and len(after.text) != 1)
        if token.text == "(" and (is_words or self.opens_condition()):
            return False
        return token.text in _OPENERS or token.text in ("begin pmatrix", "begin bmatrix")

    def factor(self) -> Node:
        node = self.atom()
        while True:
            if self.take("^"):
                node = self.power(node)
            elif self.take("!"):
                node = ("call", "!!", node) if self.take("!") else ("fact", node)
            elif self.take("%"):
                node = ("percent", node)
            elif self.take("circ"):
                node = self.degrees(node)
            elif node[0] in ("symbol", "apply") and self.take("'"):
                node = (node[0], node[1] + "'", *node[2:])
                if node[0] == "symbol" and self.next.text == "(":
                    node = ("apply", node[1], *self.arguments())
            elif node[0] == "number" and self.take("_"):
                node = self.based(node)
            else:
                return node

    def power(self, node: Node) -> Node:
        if self.take("circ", "degree") or self.take_word("o"):
            return self.degrees(node)
        if self.texts(3) == ["{", "circ", "}"]:
            self.position += 3
            return self.degrees(node)
        if self.next.text == "*" or self.texts(2) == ["{", "*"]:
            raise Unreadable("a star")
        if self.texts(2) == ["{", "'"]:
            primes = self.group_text()
            return ("symbol", node[1] + primes) if node[0] == "symbol" else ("marked", primes, node)
        if node[0] == "symbol" and node[1] in FUNCTION_LETTERS and self.is_inverse():
            self.argument()
            name = node[1] + "^-1"
            return ("apply", name, *self.arguments()) if self.next.text == "(" else ("symbol", name)
        return ("pow", node, ("neg", self.atom()) if self.take("-") else self.argument(whole_numbers=True))

    def degrees(self, node: Node) -> Node:
        """The node with the degree sign that follows, of an angle or a temperature."""
        if self.next.text in ("C", "F") and self.peek(1) is _END:
            self.tokens[self.position] = Token("word", "celsius" if self.next.text == "C" else "fahrenheit")
            return node
        return ("degree", node)

    def is_inverse(self) -> bool:
        return self.texts(4) == ["{", "-", "1", "}"]

    def based(self, node: Node) -> Node:
        """A number with its base: `204_5`, `204_{five}`."""
        text = self.group_text().strip("()")
        base = int(text) if text.isdigit() and len(text) < 3 else BELOW_100.get(text, 0)
        if base < 2:
            raise Unreadable("no base")
        return ("base", str(node[1]), base)

    def argument(self, whole_numbers: bool = False) -> Node:
        """The argument as TeX reads it: a group in braces or one character."""
        token = self.next
        if self.take("{"):
            with self.inside():
                node = self.operand()
                if self.take("choose"):
                    node = ("call", "binom", node, self.operand())
            self.expect("}")
            return node
        if token.kind == "number" and not whole_numbers and len(token.text) > 1:
            first, rest = token.text[0], token.text[1:]
            if not first.isdigit():
                raise Unreadable("no argument")
            self.tokens[self.position] = Token("number", rest)
            return ("number", Fraction(first), None)
        return self.atom()

    def values(self, closing: str) -> list[Node]:
        """The values of items in brackets, up to the closing one."""
        with self.inside():
            items, _ = self.items()
        self.expect(closing)
        return list(map(_plain_value, items))

    def arguments(self) -> list[Node]:
        """The arguments after a function's name: `(a, b)`."""
        self.expect("(")
        return self.values(")")

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
        elif token.kind == "word" and token.text in ("constant", "const") and self.peek(-1).text == "+":
            self.position += 1
            node = ("symbol", "C")
        elif token.kind in ("word", "join", "end"):
            raise Unreadable(f"{token.text or 'the end'!r} where a value should be")
        else:
            self.position += 1
            node = self.command(token.text)
        self.depth -= 1
        return node

    def command(self, text: str) -> Node:
        """The node of a bracket or a command, which has been taken."""
        if text in ("(", "[", "]"):
            return self.group(text)
        if text == r"\{":
            return self.set()
        if text == "{":
            if self.take("}"):
                return self.atom()  # `{}_8C_4`
            self.position -= 1
            return self.argument()
        if text in ("_", "^"):
            top, (letter, below) = self.argument(whole_numbers=True), self.texts(2)
            if letter not in ("C", "P") or below != "_":
                raise Unreadable("a script of nothing")
            self.position += 2
            return ("call", "binom" if letter == "C" else "P", top, self.argument(True))
        if text in ("|", r"\|"):
            with self.inside(*self.stops, bars=1):
                node = self.operand()
            self.expect(text)
            return ("abs", node) if text == "|" else ("call", "norm", node)
        if text in ("lfloor", "lceil"):
            node = self.operand()
            self.expect("r" + text[1:])
            return ("call", text[1:], node)
        if text == "frac":
            top, bottom = self.argument(), self.argument()
            return _derivative(top, bottom) or ("div", top, bottom)
        if text == "sqrt":
            degree: Node = ("number", Fraction(2), None)
            if self.take("["):
                degree = self.operand()
                self.expect("]")
            return ("root", degree, self.argument())
        if text == "binom":
            return ("call", "binom", self.argument(), self.argument())
        if text.startswith("mathbb "):
            name = text.removeprefix("mathbb ")
            while mark := self.take("^", "_"):
                name += mark + self.group_text()
            return ("numbers", name)
        if text in _MARKS:
            return self.marked(text)
        if text in _ANGLES:
            letters = self.letters() or (self.group_text() if self.next.text == "{" else "")
            return self.subscripts(f"{'triangle' if text == 'triangle' else 'angle'} {letters}")
        if text in _BIG:
            return self.big(text)
        fixed = {"infty": ("constant", "inf"), "emptyset": ("set",), "ldots": ("dots",)}
        if text not in fixed:
            raise Unreadable(f"what does {text!r} mean here?")
        return fixed[text]

    def letters(self) -> str:
        found = ""
        while self.next.kind == "symbol":
            found += self.advance()
        return found

    def number(self) -> Node:
        text = self.advance()
        if "(" in text:
            whole, _, rest = text.partition(".")
            fixed, _, repeated = rest.rstrip(")").partition("(")
            period = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
            return ("number", Fraction(f"{whole}.{fixed}0") + period, None)
        mantissa = text.casefold().partition("e")[0]
        if len(mantissa) > 200:
            raise Unreadable("too many digits")
        decimals = len(mantissa.partition(".")[2]) if "." in mantissa else None
        node: Node = ("number", Fraction(text), decimals)
        top, slash, bottom = (self.peek(offset) for offset in range(3))
        is_mixed = decimals is None and top.spaced and slash.text == "/" and (top.text + bottom.text).isdigit()
        if is_mixed and 0 < int(top.text or 0) < int(bottom.text or 0):
            node = ("number", node[1] + Fraction(int(top.text), int(bottom.text)), None)
            self.position += 3
        start = self.position
        bracket = self.take("(") or self.take("in") or self.take_word("in")
        if self.take_word("base"):
            node = self.based(node)
            self.expect(")") if bracket == "(" else None
        else:
            self.position = start
        return node

    def symbol(self) -> Node:
        name = self.advance()
        if name in ("e", "pi", "i") and self.next.text != "_":
            return ("constant", name)
        node = self.subscripts(name)
        if self.next.text == "(" and name in FUNCTION_LETTERS:
            return ("apply", node[1], *self.arguments())
        return node

    def subscripts(self, name: str) -> Node:
        """A symbol with its subscript: `a_{n}` is `a_n`."""
        while self.take("_"):
            name += "_" + self.group_text()
        return ("symbol", name)

    def marked(self, mark: str) -> Node:
        if mark == "overline" and not (self.next.text == "{" and self.peek(1).kind == "symbol"):
            return ("call", "conj", self.argument())
        in_braces = self.take("{")
        letters = self.letters() if in_braces else self.advance()
        node = self.subscripts(f"{mark} {letters}")
        if in_braces:
            self.expect("}")
        return self.subscripts(node[1])

    def function(self) -> Node:
        name = self.advance()
        if name == "Pr":
            return ("symbol", name)
        power: Node | None = None
        below: tuple[Node, ...] = ()
        while mark := self.take("^", "_"):
            if mark == "_":
                below = (self.argument(whole_numbers=True),)
            elif name in ("sin", "cos", "tan", "cot", "sec", "csc") and (
                self.is_inverse() or self.texts(2) == ["-", "1"]
            ):
                self.position += 4 if self.is_inverse() else 2
                name = "arc" + name
            else:
                power = self.argument()
        bracketed = self.next.text == "("
        arguments = self.function_arguments(name)
        node: Node = ("call", name + "_" * len(below), *below, *arguments)
        if power is not None:
            return ("pow", node, power)
        if bracketed and name in _LOGS and self.take("^"):
            return (*node[:-1], ("pow", node[-1], self.argument(whole_numbers=True)))
        return node

    def function_arguments(self, name: str) -> list[Node]:
        if self.next.text == "(":
            return self.arguments()
        if name in ("max", "min", "gcd", "lcm") and self.take(r"\{"):
            return self.values(r"\}")
        if not self.starts_factor():
            raise Unreadable(f"{name} of nothing")
        node = self.factor()
        while self.starts_factor() and self.next.kind != "function" and self.next.text not in ("(", "|"):
            node = ("mul", node, self.factor())
        return [node]

    def group(self, opening: str) -> Node:
        with self.inside():
            items, joins = self.items()
        closing = self.take(")", "]", "[")
        if not closing or (opening == "(" and closing == "[") or joins & {"or", "and", "trailing"}:
            raise Unreadable("no group")
        if closing == "[" or opening == "]":  # `]0,2[` is `(0,2)`
            if len(items) != 2:
                raise Unreadable("no interval")
            opening, closing = opening.replace("]", "("), closing.replace("[", ")")
        values = [_plain_value(item) for item in items]
        is_bracket = (opening, closing) == ("(", ")") and values[0][0] != "chain"
        if len(values) == 1 and (values[0][0] == "matrix" or is_bracket):
            return values[0]
        return ("group", opening, closing, *values)

    def set(self) -> Node:
        if self.take(r"\}"):
            return ("set",)
        with self.inside("|", ":", "mid"):
            items, joins = self.items()
        values = [_plain_value(item) for item in items]
        if self.take("|", ":", "mid"):
            with self.inside():
                conditions, how = self.items()
            self.expect(r"\}")
            parts = [_plain_value(item) for item in conditions]
            if len(items) > 1 or ("or" in how and how != {"or"}):
                raise Unreadable("a set of more than one kind")
            return ("builder", values[0], ("either", *parts)) if how == {"or"} else ("builder", values[0], *parts)
        self.expect(r"\}")
        if joins & {"or", "and", "trailing"}:
            raise Unreadable("words in brackets")
        return ("set", *values)

    def big(self, name: str) -> Node:
        below: Node = ()
        above: Node = ()
        while mark := self.take("_", "^"):
            if mark == "^":
                above = self.argument(whole_numbers=True)
            elif self.take("{"):
                below = ("group", "{", "}", *self.values("}"))
            else:
                below = self.argument(whole_numbers=True)
        return ("big", name, below, above, self.product())

    def environment(self) -> Node:
        name = self.advance().removeprefix("begin ")
        end, depth = self.position, 1
        while depth and end < len(self.tokens):
            text = self.tokens[end].text
            depth += text.startswith("begin ") - text.startswith("end ")
            end += 1
        rows = [_split(row, "&") for row in _split(self.tokens[self.position : end - 1], r"\\") if row]
        self.position = end
        if depth or not rows or name not in (*_MATRICES, "cases"):
            raise Unreadable(f"an environment {name!r}")
        if name == "cases":
            return ("cases", *(tuple(self.cell(cell) for cell in row if cell) for row in rows))
        matrix = ("matrix", *(tuple(map(self.cell, row)) for row in rows))
        return ("call", "det", matrix) if name == "vmatrix" else matrix

    def cell(self, tokens: list[Token]) -> Node:
        while tokens and (tokens[-1].text == "," or tokens[0].text in ("if", "for", "when")):
            tokens = tokens[:-1] if tokens[-1].text == "," else tokens[1:]
        claim = _Parser(tokens, self.known).claim()
        if len(claim.items) != 1:
            raise Unreadable("a cell with more than one value")
        return _plain_value(claim.items[0])


_END = Token("end", "")


def _split(tokens: list[Token], separator: str) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += token.text.startswith("begin ") - token.text.startswith("end ")
        if token.text == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _plain_value(item: Item) -> Node:
    """The value of an item that has no unit; a relation is a chain."""
    if item.unit or item.names_things:
        raise Unreadable("a unit inside a formula")
    _, operators, operands = item.chain
    return item.chain if operators else operands[0]


def _signed(sign: str, node: Node) -> Node:
    if sign == "-":
        return ("number", -node[1], node[2]) if node[0] == "number" else ("neg", node)
    return ("pm", 1 if sign == "pm" else -1, node) if sign in ("pm", "mp") else node


def _is_mixed(left: Node, right: Node) -> bool:
    r"""Whether the two are a mixed number, a whole number and a fraction of whole numbers below 1: `2\frac12`."""
    if left[0] != "number" or left[2] is not None or left[1].denominator > 1 or right[0] != "div":
        return False
    whole = all(part[0] == "number" and part[1].denominator == 1 for part in right[1:])
    return whole and 0 < right[1][1] < right[2][1]  # any other would be an unfinished sum


def _derivative(top: Node, bottom: Node) -> Node | None:
    r"""The symbol for a derivative, `\frac{dy}{dx}`; None for other quotients."""
    d = ("symbol", "d")
    if bottom[0] != "mul" or bottom[1] != d or bottom[2][0] != "symbol":
        return None
    if top == d:
        raise Unreadable("a derivative that is not worked out")
    is_known = top[0] == "mul" and top[1] == d and top[2][0] == "symbol"
    return ("symbol", f"d{top[2][1]}/d{bottom[2][1]}") if is_known else None
