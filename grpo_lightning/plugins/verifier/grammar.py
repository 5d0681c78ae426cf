"""Parses the tokens of an answer into one claim. Text that the grammar does not know is no answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from grpo_lightning.plugins.verifier.number_words import in_digits
from grpo_lightning.plugins.verifier.tokens import SHORT, Token, Unreadable, tokenize
from grpo_lightning.plugins.verifier.units import CURRENCIES, TEMPERATURES, TIMES, UNITS, Unit, product_of
from grpo_lightning.plugins.verifier.words import BELOW_100, SCALES, changes, word_set

Node = tuple[Any, ...]
"""A tree: the kind of node, then its parts. Equal trees have equal meaning; see `_Parser` for the kinds."""

MAX_TOKENS, MAX_DEPTH = 500, 25
MONTHS = word_set("january february march april may june july august september october november december")
RELATIONS = word_set(
    "= < > le ge ne approx in equiv subset subseteq to sim mapsto propto notin parallel perp supset cong"
)
FUNCTION_LETTERS = frozenset("fghFGH")
CHOICES = "ABCDEFGHIJ"
_CONDITIONS = word_set("for where when with provided if given assuming")
_QUANTIFIERS = word_set("all any every some each is are an integer integers constant arbitrary real number numbers")
_AFTER_NO_CHOICE = word_set("/ = ^ * + - ( , ! ' _ < > in no not")
_OPENERS = word_set(r"frac sqrt binom lfloor lceil infty overline vec hat dot ddot tilde angle triangle ( { ")
_MATRICES = word_set("pmatrix bmatrix matrix array vmatrix Bmatrix smallmatrix")
_MARKS = ("overline", "vec", "hat", "dot", "ddot", "tilde", "angle", "triangle", "measuredangle")
_SETS = {"cup": "union", "cap": "meet", "setminus": "minus"}
_FIXED: dict[str, Node] = {"infty": ("constant", "inf"), "emptyset": ("set",), "ldots": ("dots",)}
_PHRASES = dict.fromkeys(("all real numbers", "all reals"), ("numbers", "R"))
_PHRASES |= dict.fromkeys(("infinity", "infinite", "infinitely many"), _FIXED["infty"])
_TWO: Node = ("number", Fraction(2), None)
_OPENING = word_set("= : , approx therefore implies to Rightarrow Longrightarrow")
"""Signs before an answer that say nothing."""
_END = Token("end", "")


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
    while tokens and tokens[0].kind in ("mark", "command") and tokens[0].text in _OPENING:
        tokens = tokens[1:]
    return _Parser(tokens, known).claim()


class _Parser:
    """Parses tokens by recursive descent.

    The kinds of nodes, each with the names of its parts:
    number value decimals · symbol name · constant name · add · neg · mul · div · pow ·
    root degree radicand · call name arguments · apply name arguments · fact · abs · percent · degree · pm sign ·
    group opening closing items · set · builder body conditions · matrix rows · cases rows · ratio · base digits base ·
    time half hours minutes · words · dots · chain operators operands · union · minus · meet · numbers name ·
    mod value modulus · named text · choice letter claim.
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
        return self.advance() if token.text in texts and token.kind not in ("word", "symbol", "number") else ""

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
        return self.next is _END or self.next.text in (")", "]", r"\}", "}")

    def skip_words(self, *others: str) -> list[str]:
        """Takes all words and symbols that come next."""
        start = self.position
        while self.next.kind in ("word", "symbol", *others) or (self.next.text == "in" and "command" not in others):
            self.position += 1
        return [token.text for token in self.tokens[start : self.position]]

    def matching(self, start: int) -> int:
        """The index of the bracket that closes the one at `start`."""
        depth = 0
        for index in range(start, len(self.tokens)):
            text = self.tokens[index].text
            depth += (text in ("(", "[", "{", r"\{")) - (text in (")", "]", "}", r"\}"))
            if depth == 0:
                return index
        raise Unreadable("an open bracket")

    def in_brackets(self) -> list[Token]:
        """The tokens inside of the round bracket that comes next; none if none does."""
        return self.tokens[self.position + 1 : self.matching(self.position)] if self.next.text == "(" else []

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
            elif found.count(",") > 1:
                raise Unreadable("an empty item in a list")
            else:
                joins.add("or" if "or" in found else "and" if "and" in found else found[0])
                items.append(self.item())

    def opens_condition(self) -> bool:
        r"""Whether `where x \ne 1`, `for integer n`, `k an integer` or `(x \ne 1)` begins here."""
        if self.next.text == "(" and self.position:
            inside = self.in_brackets()
            return any(token.text in ("ne", "in") for token in inside) and inside[0].kind == "symbol"
        is_letter = len(self.next.text) == 1 and self.next.kind in ("symbol", "word")
        after = self.peek(1).text
        if self.peek(-1).text == "," and is_letter and after in ("is", "an", "any", "integer"):
            return True
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
        found = [text for text in self.skip_words("command") if text not in ("a", "A")]
        names = [text for text in found if len(text) == 1]
        words = {text.casefold() for text in found if len(text) > 1}
        if len(names) == 1 and self.at_end() and not words - _QUANTIFIERS:
            numbers = "Z" if words & {"integer", "integers"} else "R"
            return Item(("chain", ("in",), (("symbol", names[0]), ("numbers", numbers))))
        self.position = start
        return self.item()

    def item(self) -> Item:
        """One item: a choice, words, or values and the relations between them, with a unit."""
        if choice := self.choice():
            return Item(("chain", (), (choice,)))
        currency = self.currency()
        if self.next.text in ("a", "A", "an") and self.peek(1).kind == "word" and len(self.peek(1).text) > 2:
            self.position += 1
        if self.is_date() or self.is_text():
            return Item(("chain", (), (self.words(),)))
        operators: list[str] = []
        operands = [self.operand()]
        while (
            self.next.kind in ("mark", "command") and self.next.text in RELATIONS and self.next.text not in self.stops
        ):
            operators.append(self.advance())
            currency = currency or self.currency()
            operands.append(self.words() if self.is_text() else self.operand())
        if self.take("pmod"):
            operands[-1] = ("mod", operands[-1], self.argument())
        elif self.next.text == "(" and self.peek(1).text in ("mod", "bmod"):
            self.position += 2
            operands[-1] = ("mod", operands[-1], self.operand())
            self.expect(")")
        scale, unit, things = self.unit(currency)
        if operands[-1][0] == "degree" and len(unit) == 1 and unit[0][0] in TEMPERATURES:
            operands[-1], unit = operands[-1][1], ((TEMPERATURES[unit[0][0]], 1),)
        if scale != 1:
            value = operands[-1]
            factor = ("number", Fraction(scale), None)
            operands[-1] = ("number", value[1] * scale, None) if value[0] == "number" else ("mul", value, factor)
        if unit == (("percent", 1),):
            operands[-1], unit = ("percent", operands[-1]), ()
        return Item(("chain", tuple(operators), tuple(operands)), unit, things > 0, things > 1)

    def is_date(self) -> bool:
        """Whether a date begins here: `20 June`, `20th of June`."""
        start = 1
        while self.peek(start).text in ("st", "nd", "rd", "th", "of"):
            start += 1
        return self.next.kind == "number" and self.peek(start).text.casefold() in MONTHS

    def currency(self) -> str:
        """Takes a currency before a number, as `$` or `USD`; returns it, or nothing."""
        start, name = self.position, CURRENCIES.get(self.next.text, "")
        if not name or self.next.kind == "mark":
            self.position += bool(name)
            return name
        self.position += 1
        while self.take(".", "$"):
            pass
        if self.next.kind == "number":
            return name
        self.position = start
        return ""

    def choice(self) -> Node | None:
        """The choice that begins here, a letter alone or before its text: `(C)`, `C.`, `(C) 12`; else None."""
        if len(self.peek(1).text) == 1 or self.peek(2).text == ")":
            self.take_word("choice", "option")
        texts = self.texts(3)
        end = 3 if texts[0] == "(" and texts[2] == ")" else 2 if texts[1] in (")", ".", ":") else 0
        letter = texts[1] if end == 3 else texts[0]
        after = self.peek(end)
        if not end or len(letter) != 1 or letter not in CHOICES:
            return None
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

    def is_text(self) -> bool:
        """Whether a word begins here that is no symbol set in upright letters."""
        return self.next.kind == "word" and not self.is_operand_word()

    def is_operand_word(self) -> bool:
        token = self.next
        return token.kind == "word" and token.text.isascii() and (len(token.text) == 1 or token.text.isupper())

    def words(self) -> Node:
        """Text that is an answer by itself: `Tuesday`, `June 20`."""
        first = [self.advance()]
        found = first + self.skip_words("number", "command")
        return _PHRASES.get(" ".join(found).casefold(), ("words", *found))

    # ----- units

    def unit(self, sign: str = "") -> tuple[int, Unit, int]:
        """The scale and the unit after a value, and 1 for `left`, 2 for `cookies`. `sign`: the currency before it."""
        scale = 1
        while self.next.kind == "word" and self.next.text in SCALES and f"{self.next.text}s" not in self.known:
            scale *= SCALES[self.advance()]
        currency = self.currency()
        factors: dict[str, int] = {currency: 1} if currency else {}
        self.unit_product(factors, 1)
        self.take("/")
        phrase = [] if self.opens_condition() else self.skip_words()
        while phrase and self.next.kind == "word" and not self.opens_condition():
            phrase += self.skip_words()
        if self.next.kind == "number" and phrase[-2:] == ["out", "of"]:
            self.position += 1
        is_letter = any(len(b) == 1 and b not in "aAI/" and a != "of" for a, b in pairwise(["", *phrase]))
        if is_letter or changes(phrase, self.known):
            raise Unreadable(f"{' '.join(phrase)!r} is no unit")
        inside = self.in_brackets()
        names = [token.text for token in inside if token.kind == "word"]
        if inside and len(names) == len(inside) and not changes(names, self.known):
            self.position += len(inside) + 2
            phrase = phrase or names
        unit = _sorted(factors) or ((sign, 1),) * bool(sign)
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
            is_inside = found and self.peek(-1).kind == "word" and (token.text in SHORT or name in TIMES)
            if is_inside or (token.text == "in" and self.peek(1).kind == "word"):
                return found  # `5 litres in total`, `5 litres every day`, `$5 in total`
            if name and (token.kind == "word" or self.is_letter_of_unit()):
                self.position += 1
                self.take(".")
                power = sign * square * self.unit_power()
                for base, times in product_of(name):
                    factors[base] = factors.get(base, 0) + power * times
            elif found and (self.take("/") or self.take_word("per")):
                if not self.unit_product(factors, -sign):
                    self.position = start
                    return found
            elif not (found and self.take("*")):
                self.position = start
                return found
            found = True

    def is_letter_of_unit(self) -> bool:
        """Whether a letter begins here that is a unit: `m` of `7 m`, if it is no variable of the question."""
        token, before = self.next, self.peek(-1)
        if token.kind != "symbol" or token.text not in UNITS or token.text in self.known:
            return False
        return before.text in ("/", "*") or before.kind == "word" or self.opens_unit()

    def opens_unit(self) -> bool:
        """Whether letters behind a number, and a space, are its unit, up to the end of the item: `7 m/s`."""
        if self.peek(-1).text == "circ" and self.next.kind == "symbol":
            return self.next.text in ("C", "F") and self.peek(1).text in ("", ",", "or", "and")
        is_known = bool(self.known) or self.peek(1).text == "/"
        is_spaced = is_known and self.next.spaced and self.next.kind == "symbol" and self.peek(-1).kind == "number"
        if not is_spaced or self.next.text not in UNITS or self.next.text in self.known:
            return False
        for token in self.tokens[self.position :]:
            if token.text in (",", "or", "and"):
                break
            if token.text not in ("/", "^", "{", "}", "-", "*") and token.kind != "number" and token.text not in UNITS:
                return False
        return True

    def unit_power(self) -> int:
        word = self.take_word("squared", "cubed")
        text = "23"[word == "cubed"] if word else self.group_text() if self.take("^") else "1"
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
        texts = [token.text for token in self.tokens[self.position :]]
        relation = depth = 0
        while relation < len(texts) and (depth or texts[relation] not in ("=", "approx")):
            depth += (texts[relation] in ("(", "{", r"\{")) - (texts[relation] in (")", "}", r"\}"))
            relation += 1
        side = self.tokens[self.position : self.position + relation]
        if relation == len(texts) or not side or any(token.kind == "join" for token in side):
            return None
        is_composed = any(a.kind == "symbol" and b.text == "circ" for a, b in pairwise(side))
        is_opaque = texts[0] in ("sum", "prod", "int", "lim") or texts[:3] == ["frac", "{", "d"]
        is_letter = side[0].kind in ("symbol", "word") or side[0].text in ("mathbb P", "mathbb E", "Pr")
        opening = texts.index("(") if "(" in texts[:relation] else 0
        is_script = opening == 1 or texts[1] in ("'", "_", "^")
        is_script = (
            is_script and opening < 9 and not any(a.kind == b.kind == "symbol" for a, b in pairwise(side[:opening]))
        )
        last = self.matching(self.position + opening) - self.position if opening else 0
        if is_composed or is_opaque or (is_letter and opening and is_script and last == relation - 1 > opening + 1):
            self.position += relation
            return ("named", "".join(text for text in texts[:relation] if text not in ("{", "}")))
        return None

    def ratio(self) -> Node:
        parts = [self.sum()]
        while (":" not in self.stops and self.take(":")) or (self.peek(1).kind == "number" and self.take_word("to")):
            parts.append(self.sum())
        if half := self.take_word("am", "pm"):
            if not all(part[0] == "number" for part in parts):
                raise Unreadable("no time")
            return ("time", half, *(*(part[1] for part in parts), Fraction(), Fraction())[:3])
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
                is_shown = self.next.text == "(" and any(token.text == "=" for token in self.tokens[self.position :])
                is_number = self.next.kind == "number" or (self.next.text == "{" and self.peek(1).kind == "number")
                right = self.factor()
                if is_fraction and _is_mixed(node, right):
                    node = ("number", node[1] + right[1][1] / right[2][1], None)
                elif (
                    right[0] == "number"
                    and not is_shown
                    and (node[0] == "number" or (is_number and node != ("constant", "i")))
                ):
                    raise Unreadable("two numbers side by side")
                else:
                    node = ("mul", node, right)
            else:
                return node

    def signed_factor(self) -> Node:
        return ("neg", self.factor()) if self.take("-") else self.factor()

    def starts_factor(self) -> bool:
        """Whether a factor of a product without a sign begins here."""
        token, after = self.next, self.peek(1)
        if token.kind in ("number", "symbol", "function"):
            return not self.opens_unit()
        if token.text == "|":
            return self.bars == 0 and "|" not in self.stops
        is_words = after.text in ("mod", "bmod") or (after.kind == "word" and len(after.text) != 1)
        if token.text == "(" and (is_words or self.opens_condition()):
            return False
        return token.kind not in ("word", "join") and token.text in (*_OPENERS, "begin pmatrix", "begin bmatrix")

    def factor(self) -> Node:
        """An atom with what follows it: powers, factorials, signs, primes, a base."""
        node = self.atom()
        while True:
            if self.take("^"):
                node = self.power(node)
            elif self.take("!"):
                node = ("call", "!!", node) if self.take("!") else ("fact", node)
            elif self.take("%"):
                node = ("percent", node)
            elif self.take("circ"):
                node = ("degree", node)
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
            return ("degree", node)
        if self.texts(3) == ["{", "circ", "}"]:
            self.position += 3
            return ("degree", node)
        return ("pow", node, ("neg", self.atom()) if self.take("-") else self.argument(whole_numbers=True))

    def takes_inverse(self) -> bool:
        """Takes the exponent -1 of an inverse function; returns whether it is there."""
        length = 4 if self.texts(4) == ["{", "-", "1", "}"] else 2 if self.texts(2) == ["-", "1"] else 0
        self.position += length
        return length > 0

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
            if not token.text[0].isdigit():
                raise Unreadable("no argument")
            self.tokens[self.position] = Token("number", token.text[1:])
            return ("number", Fraction(token.text[0]), None)
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
            end, depth = self.matching(self.position - 1), 0
            if self.next.kind == "symbol" and self.peek(1).text in ("|", ":", "mid"):
                return self.set("}")
            for token in self.tokens[self.position : end]:
                depth += (token.text in ("(", "{", r"\{")) - (token.text in (")", "}", r"\}"))
                if token.text == "," and not depth:
                    return self.set("}")
            self.position -= 1
            return self.argument()
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
            return ("div", self.argument(), self.argument())
        if text == "sqrt":
            degree = _TWO
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
            return self.subscripts(f"{text} {self.letters() or self.group_text()}")
        if text not in _FIXED:
            raise Unreadable(f"what does {text!r} mean here?")
        return _FIXED[text]

    def letters(self) -> str:
        found = ""
        while self.next.kind == "symbol":
            found += self.advance()
        return found

    def number(self) -> Node:
        """A number: an integer, a decimal, a repeating one, a mixed one, one with its base."""
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
        return node

    def symbol(self) -> Node:
        name = self.advance()
        if name in ("e", "pi", "i") and self.next.text != "_":
            return ("constant", name)
        node = self.subscripts(name)
        is_applied = self.next.text == "(" and name in FUNCTION_LETTERS
        return ("apply", node[1], *self.arguments()) if is_applied else node

    def subscripts(self, name: str) -> Node:
        """A symbol with its subscript: `a_{n}` is `a_n`."""
        while self.take("_"):
            name += "_" + self.group_text()
        return ("symbol", name)

    def function(self) -> Node:
        r"""A function with its power, its base and its arguments: `\sin^2 x`, `\log_2 8`, `\ln(x)^2`."""
        name = self.advance()
        power: Node | None = None
        below: tuple[Node, ...] = ()
        while mark := self.take("^", "_"):
            if mark == "_":
                below = (self.argument(whole_numbers=True),)
            elif name in ("sin", "cos", "tan", "cot", "sec", "csc") and self.takes_inverse():
                name = "arc" + name
            else:
                power = self.argument()
        node: Node = ("call", name + "_" * len(below), *below, *self.function_arguments(name))
        return node if power is None else ("pow", node, power)

    def function_arguments(self, name: str) -> list[Node]:
        if self.next.text == "(":
            return self.arguments()
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

    def set(self, closing: str = r"\}") -> Node:
        if self.take(closing):
            return ("set",)
        with self.inside("|", ":", "mid"):
            items, joins = self.items()
        values = [_plain_value(item) for item in items]
        if self.take("|", ":", "mid"):
            with self.inside():
                conditions, how = self.items()
            self.expect(closing)
            parts = [_plain_value(item) for item in conditions]
            if len(items) > 1 or ("or" in how and how != {"or"}):
                raise Unreadable("a set of more than one kind")
            return ("builder", values[0], ("either", *parts)) if how == {"or"} else ("builder", values[0], *parts)
        self.expect(closing)
        if joins & {"or", "and", "trailing"}:
            raise Unreadable("words in brackets")
        return ("set", *values)

    def environment(self) -> Node:
        name = self.advance().removeprefix("begin ")
        end, depth = self.position, 1
        while depth and end < len(self.tokens):
            depth += _nesting(self.tokens[end])
            end += 1
        rows = [_split(row, "&") for row in _split(self.tokens[self.position : end - 1], r"\\") if row]
        self.position = end
        if depth or not rows or name not in (*_MATRICES, "cases"):
            raise Unreadable(f"an environment {name!r}")
        cells = [tuple(self.cell(cell) for cell in row if cell or name != "cases") for row in rows]
        node = ("cases" if name == "cases" else "matrix", *cells)
        return ("call", "det", node) if name == "vmatrix" else node

    def cell(self, tokens: list[Token]) -> Node:
        while tokens and (tokens[-1].text == "," or tokens[0].text in ("if", "for", "when")):
            tokens = tokens[:-1] if tokens[-1].text == "," else tokens[1:]
        claim = _Parser(tokens, self.known).claim()
        if len(claim.items) != 1:
            raise Unreadable("a cell with more than one value")
        return _plain_value(claim.items[0])


def read_unit(text: str) -> tuple[Unit, str, str]:
    """The unit that a text begins with, its last token and the one behind it; no unit if there is none."""
    parser = _Parser(list(tokenize(rf"\text{{{text}}}")), frozenset())
    factors: dict[str, int] = {}
    parser.unit_product(factors, 1)
    return _sorted(factors), parser.peek(-1).text, parser.next.text


def _sorted(factors: dict[str, int]) -> Unit:
    """The normal form of a product of units; degrees of Celsius are no angles."""
    is_temperature = not {"celsius", "fahrenheit"}.isdisjoint(factors)
    names = (name for name, power in factors.items() if power and not (is_temperature and name == "degree"))
    return tuple((name, factors[name]) for name in sorted(names))


def _nesting(token: Token) -> int:
    return token.text.startswith("begin ") - token.text.startswith("end ")


def _split(tokens: list[Token], separator: str) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += _nesting(token)
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
