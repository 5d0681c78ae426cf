"""Parses the tokens of an answer into one claim. Text that the grammar does not know is no answer."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from grpo_lightning.plugins.verifier.number_words import in_digits
from grpo_lightning.plugins.verifier.tokens import Token, Unreadable, tokenize
from grpo_lightning.plugins.verifier.units import CURRENCIES, SCALES, UNITS, Unit, counts_things, is_phrase, word_set

Node = tuple[Any, ...]
"""A tree: the kind of node, then its parts. Equal trees have equal meaning; see `_Parser` for the kinds."""

MAX_TOKENS, MAX_DEPTH = 500, 25
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "le": "le", "ge": "ge", "ne": "ne", "approx": "approx", "in": "in", "equiv": "equiv",
    "subset": "subset", "subseteq": "subseteq", "to": "to", "sim": "sim", "mapsto": "mapsto", "propto": "propto",
    "notin": "notin", "parallel": "parallel", "perp": "perp", "supset": "supset", "cong": "cong",
}  # fmt: skip
FUNCTION_LETTERS = frozenset("fghFGH")
_LOGS = ("ln", "log", "lg")
LABELS = word_set(
    "the a final correct answer answers is are total sum probability area volume perimeter length width height "
    "distance speed cost price time number value solution solutions choice option so therefore hence thus mean "
    "median mode average result of x it that slope ratio degree degrees remainder radius percent percentage "
    "profit"
)
_BASE_WORDS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = {name: base for base, word in enumerate(_BASE_WORDS.split(), 2) for name in (word, str(base))}


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
    """The separators between the items: `,`, `;`, `and`, `or`."""


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
    tokens = in_digits(tokenize(text, brackets))
    if len(tokens) > MAX_TOKENS:
        raise Unreadable("too long")
    return _Parser(_without_frame(tokens, known), known).claim()


def _without_frame(tokens: list[Token], known: frozenset[str]) -> list[Token]:
    """The tokens without marks around the whole and without a label before it: `The answer is`, `Total =`."""
    while tokens and tokens[-1].text in (".", ",", ";", r"\\", "!") and tokens[-1].kind == "mark":
        if tokens[-1].text == "!" and not tokens[-1].spaced and not (len(tokens) > 1 and tokens[-2].kind == "word"):
            break
        tokens = tokens[:-1]
    while tokens and tokens[0].kind in ("mark", "command") and tokens[0].text in ("=", ":", ",", "approx"):
        tokens = tokens[1:]
    words = 0
    while words < len(tokens) and tokens[words].kind == "word":
        words += 1
    is_usual = 0 < words < len(tokens) and all(token.text.casefold() in LABELS for token in tokens[:words])
    if is_usual and (tokens[words].text in ("=", ":") or tokens[words - 1].text.casefold() in ("is", "are")):
        return _without_frame(tokens[words:], known)
    if 0 < words < len(tokens) and tokens[words].text in ("(", "[") and _names_tuple(tokens[:words], known):
        return _without_frame(tokens[words:], known)
    if start := _quantified(tokens):
        return _without_frame(tokens[start:], known)
    while 0 < words < len(tokens) and (
        tokens[words].kind in ("word", "symbol") or tokens[words].text in ("triangle", "angle")
    ):
        words += 1
    is_label = 0 < words < len(tokens) - 1 and tokens[words].text in ("=", ":") and _is_label(tokens[:words], known)
    return _without_frame(tokens[words + 1 :], known) if is_label else tokens


def _is_label(tokens: list[Token], known: frozenset[str]) -> bool:
    """Whether the tokens are a label: one noun, or words of the question or the table, as `Area of ABC`."""
    low = [token.text.casefold() for token in tokens if token.kind == "word"]
    if len(low) == len(tokens) == 1:
        return len(low[0]) > 2 and low[0] not in DENIALS
    has_symbols = len(low) < len(tokens)
    return (
        (not has_symbols or "of" in low)
        and all(word in LABELS or word in known for word in low)
        and not DENIALS & {*low}
    )


def _quantified(tokens: list[Token]) -> int:
    """The index at which the inequality of `all real x such that x > 3` begins; 0 if there is none."""
    start = 0
    while start + 1 < len(tokens) and (tokens[start].text.casefold() in _SETS or len(tokens[start].text) == 1):
        if tokens[start].kind not in ("word", "symbol"):
            break
        if len(tokens[start].text) == 1 and tokens[start + 1].kind != "word":
            break
        start += 1
    is_set = start and tokens[0].text.casefold() in ("all", "any", "every", "the")
    has_order = any(token.text in ("<", ">", "le", "ge", "ne") for token in tokens[start:])
    return (
        start
        if is_set and has_order and all(token.kind != "word" or len(token.text) == 1 for token in tokens[start:])
        else 0
    )


def _names_tuple(tokens: list[Token], known: frozenset[str]) -> bool:
    """Whether the tokens name a tuple: `vertex` of `vertex (2,-1)`."""
    low = {token.text.casefold() for token in tokens}
    nouns = low & _PLACES
    return bool(nouns) and not low & DENIALS and all(word in _PLACES | LABELS or word in known for word in low)


_PLACES = word_set(
    "vertex center centre point points focus midpoint coordinates coordinate intersection interval range domain pair "
    "ordered at vector triple"
)
MONTHS = word_set("january february march april may june july august september october november december")
_SETS = word_set("all any every real numbers number values value of such that satisfying where with the set")
DENIALS = word_set(
    "not no isn't without never neither nor either unless except than least most less more min max minimum "
    "maximum if wrong incorrect false maybe perhaps possibly probably unsure anything but or other another "
    "first last one none dne"
)


class _Parser:
    """Parses tokens by recursive descent.

    The kinds of nodes, each with the names of its parts:
    number value decimals · symbol name · constant name · add · neg · mul · div · pow ·
    root degree radicand · call name arguments · apply name arguments · fact · abs · percent · degree · pm sign ·
    group opening closing items · set · builder body conditions · matrix rows · cases rows · ratio · base digits base ·
    time hours minutes half · words · dots · chain operators operands · union · minus · meet · numbers name ·
    big name below above body · mod value modulus · marked mark name.
    """

    def __init__(self, tokens: list[Token], known: frozenset[str]) -> None:
        self.tokens, self.known, self.position, self.depth = tokens, known, 0, 0
        self.bars = 0
        self.stops: list[str] = []

    # ----- tokens

    @property
    def next(self) -> Token:
        return self.tokens[self.position] if self.position < len(self.tokens) else _END

    def peek(self, offset: int) -> Token:
        return self.tokens[self.position + offset] if 0 <= self.position + offset < len(self.tokens) else _END

    def take(self, *texts: str) -> str:
        token = self.next
        if token.text in texts and token.kind in ("mark", "command", "environment", "join"):
            self.position += 1
            return token.text
        return ""

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"expected {text}, found {self.next.text or 'the end'}")

    # ----- claims

    def claim(self) -> Claim:
        items, joins = self.items()
        if self.position < len(self.tokens):
            raise Unreadable(f"what does {self.next.text!r} mean here?")
        if not items:
            raise Unreadable("nothing")
        return Claim(tuple(items), frozenset(joins))

    def items(self) -> tuple[list[Item], set[str]]:
        """The items up to a closing bracket or the end, and their separators."""
        items, joins = [self.item()], set[str]()
        while True:
            if self.next.kind == "join" and self.next.text in self.stops:
                return items, joins
            found: list[str] = []
            while join := self.take(",", ";", "and", "or") or (self.take_conclusion() if found else ""):
                found.append(join)
            if self.opens_condition():
                joins.add("where")
                items.append(self.condition())
                continue
            if not found or self.at_end():
                return items, joins | ({"trailing"} if found else set())
            if "or" in found and self.next.text in ("about", "approximately", "roughly"):
                self.position += 1
                _, operators, operands = items[-1].chain
                items[-1] = Item(("chain", (*operators, "approx"), (*operands, self.operand())), items[-1].unit)
                continue
            if found.count(",") > 1:
                raise Unreadable("an empty item in a list")
            joins.add("or" if "or" in found else "and" if "and" in found else found[0])
            items.append(self.item())

    def take_conclusion(self) -> str:
        """Takes the `so` of `a=4, b=3, so a+b=7`; returns its text, or nothing."""
        is_word = self.next.kind == "word" and self.next.text in ("so", "thus", "hence", "then", "therefore")
        return self.advance() if is_word else ""

    def opens_condition(self) -> bool:
        r"""Whether `where x \ne 1`, `for integer n` or `(x \ne 1)` begins here."""
        if self.next.text == "(" and self.position:
            inside = self.tokens[self.position + 1 : self.matching(self.position)]
            return any(token.text in ("ne", "in") for token in inside) and inside[0].kind == "symbol"
        if self.is_named_counter():
            return True
        if self.next.kind != "word" or self.next.text not in _CONDITIONS:
            return False
        return len(self.peek(1).text) == 1 or self.peek(1).text in _QUANTIFIERS

    def is_named_counter(self) -> bool:
        """Whether `k an integer` begins here, after a comma."""
        return (
            self.peek(-1).text == ","
            and len(self.next.text) == 1
            and self.next.kind in ("symbol", "word")
            and self.peek(1).text in ("is", "an", "any", "integer")
        )

    def condition(self) -> Item:
        r"""The condition that begins here: `n \in \mathbb Z` for `for integer n`."""
        if self.take("("):
            item = self.item()
            self.expect(")")
            return item
        self.position += not self.is_named_counter()
        start = self.position
        found = []
        while self.next.kind in ("word", "symbol"):
            found.append(self.advance())
        names = [text for text in found if len(text) == 1 and text not in ("a", "A")]
        words = {text.casefold() for text in found if len(text) > 1}
        if len(names) == 1 and self.at_end() and words and not words - _QUANTIFIERS - {"is", "are", "an"}:
            is_whole = bool(words & {"integer", "integers"})
            if is_whole or words & {"constant", "real"}:
                return Item(("chain", ("in",), (("symbol", names[0]), ("numbers", "Z" if is_whole else "R"))))
        self.position = start
        return self.item()

    def at_end(self) -> bool:
        return self.position >= len(self.tokens) or self.next.text in (")", "]", r"\}")

    def amount(self, value: Node, currency: str) -> tuple[Node, Unit] | None:
        """A value and its unit, if an equals sign follows; else None."""
        start = self.position
        if self.next.kind == "word":
            try:
                scale, unit, _ = self.unit()
            except Unreadable:
                scale, unit = 1, ()
            if unit and self.next.text == "=":
                return (("mul", ("number", Fraction(scale), None), value) if scale != 1 else value), unit
        self.position = start
        return (value, ((currency, 1),)) if currency and self.next.text == "=" else None

    def item(self) -> Item:
        self.quantifier()
        choice = self.choice()
        if choice:
            return Item(("chain", (), (choice,)))
        currency = self.currency()
        if self.next.text in ("a", "A", "an") and self.peek(1).kind == "word" and len(self.peek(1).text) > 2:
            self.position += 1
        if self.is_date() or (self.next.kind == "word" and not self.is_operand_word()):
            return Item(("chain", (), (self.words(),)))
        operators, operands, amounts = [], [self.operand()], []
        if self.take("over"):
            operands = [("div", operands[0], self.operand())]
        while True:
            amount = self.amount(operands[-1], currency)
            if amount:
                amounts.append(amount)
                operands.pop()
                currency = ""
            relation = RELATIONS.get(self.next.text, "") if self.next.kind in ("mark", "command") else ""
            if not relation or relation in self.stops:
                break
            self.position += 1
            if not amount:
                operators.append(relation)
            if not currency:
                currency = self.currency()
            operands.append(self.words() if self.next.kind == "word" and not self.is_operand_word() else self.operand())
        if operators[-1:] == ["equiv"] and operands[-1][:2] == ("call", "mod"):
            operands[-1] = ("mod", *operands[-1][2:])
        if self.take("pmod") or (self.next.text == "(" and self.peek(1).text in ("mod", "bmod") and self.advance()):
            in_brackets = self.next.text in ("mod", "bmod") and self.advance()
            operands[-1] = ("mod", operands[-1], self.argument() if not in_brackets else self.operand())
            if in_brackets:
                self.expect(")")
        self.quantifier()
        scale, unit, things = self.unit(currency)
        if scale != 1 and operands[-1][0] == "number":
            operands[-1] = ("number", operands[-1][1] * scale, None)
        elif scale != 1:
            operands[-1] = ("mul", operands[-1], ("number", Fraction(scale), None))
        if currency:
            unit = unit or ((currency, 1),)
        if unit == (("percent", 1),):
            operands[-1], unit = ("percent", operands[-1]), ()
        self.quantifier()
        if amounts and (len(operators) != len(operands) - 1 or set(operators) - {"="}):
            raise Unreadable("a chain of amounts that is none")
        return Item(("chain", tuple(operators), tuple(operands)), unit, bool(things), things > 1, tuple(amounts))

    def is_date(self) -> bool:
        """Whether a date begins here: `20 June`, `20th of June`."""
        start = 1
        while self.peek(start).text in ("st", "nd", "rd", "th", "of"):
            start += 1
        return self.next.kind == "number" and self.peek(start).text.casefold() in MONTHS

    def advance(self) -> str:
        self.position += 1
        if self.position > len(self.tokens):
            raise Unreadable("it ends too early")
        return self.tokens[self.position - 1].text

    def currency(self) -> str:
        """Takes a currency sign before a number; returns the currency, or nothing."""
        if self.next.text in CURRENCIES and self.next.kind == "mark":
            return CURRENCIES[self.advance()]
        return ""

    def quantifier(self) -> None:
        """Skips `for all real x` if it adds nothing."""
        start = self.position
        if self.next.text == "forall" or (self.next.text == "for" and self.peek(1).text in ("all", "any", "every")):
            self.position += 1
            while self.next.kind == "word" and self.next.text in ("all", "any", "every", "real", "values", "of"):
                self.position += 1
            if self.next.kind in ("symbol", "word") and len(self.next.text) == 1:
                self.position += 1
                if self.take("in"):
                    self.operand()
                return
        self.position = start

    def choice(self) -> Node | None:
        """The choice that begins here, a letter alone or before its text: `(C)`, `C.`, `(C) 12`; else None."""
        texts = [self.peek(offset).text for offset in range(3)]
        if texts[0] in ("Choice", "Option", "choice", "option"):
            self.position += 1
            return self.choice() or (("symbol", self.advance()) if len(self.next.text) == 1 else None)
        for letter, end in ((texts[1], 3 if texts[0] == "(" and texts[2] == ")" else 0), (texts[0], 2)):
            is_marked = end == 3 or (end == 2 and texts[1] in (")", ".", ":"))
            if not (is_marked and len(letter) == 1 and letter in "ABCDEFGHIJ"):
                continue
            after = self.peek(end)
            if after is _END or after.text in (",", ";", "and", "or", ")"):
                if end == 2 and texts[1] == ")" and self.position:
                    return None
                self.position += end
                return ("symbol", letter)
            if (
                self.position == 0
                and (end == 3 or texts[1] != "." or after.spaced)
                and after.text not in _AFTER_NO_CHOICE
            ):
                if after.text == "(":
                    return None
                self.position += end
                if any(
                    token.kind == "word" and token.text.casefold() in DENIALS for token in self.tokens[self.position :]
                ):
                    raise Unreadable("a choice that is taken back")
                rest = _Parser(self.tokens[self.position :], self.known).claim()
                self.position = len(self.tokens)
                if len(rest.items) > 1 or {*rest.items[0].chain[1]} - {"=", "approx"}:
                    raise Unreadable("a second claim")
                return ("choice", letter, rest)
        return None

    def is_operand_word(self) -> bool:
        """Whether the word is a symbol set in upright letters."""
        token = self.next
        return token.kind == "word" and token.text.isascii() and (len(token.text) == 1 or token.text.isupper())

    def words(self) -> Node:
        """Text that is an answer by itself: `Tuesday`, `June 20`."""
        found: list[str] = []
        while self.next.kind in ("word", "number") or (self.next.kind == "symbol" and found):
            found.append(self.next.text)
            self.position += 1
        if [word.casefold() for word in found] in (["all", "real", "numbers"], ["all", "reals"]):
            return ("numbers", "R")
        return ("words", *found)

    def unit(self, sign: str = "") -> tuple[int, Unit, int]:
        """The scale and the unit after a value, and 1 for `left`, 2 for `cookies`. `sign`: the currency before it."""
        scale = 1
        while self.next.kind == "word" and self.next.text in SCALES:
            scale *= SCALES[self.advance()]
        factors: dict[str, int] = {}
        currency = self.currency()
        if currency:
            factors[currency] = 1
        self.unit_product(factors, 1)
        phrase = ["per"] if self.next.text == "/" and self.advance() else []
        while not self.opens_condition() and (
            self.next.kind in ("word", "symbol") or (self.next.text in ("per", "in") and self.next.kind == "command")
        ):
            phrase.append(self.advance())
        if self.next.kind == "number" and phrase[-2:] == ["out", "of"]:
            phrase = phrase[:-2]
            self.position += 1
        if phrase and phrase[0] in ("(", ")"):
            raise Unreadable("brackets")
        if phrase and (factors or sign):
            phrase = ["units", *phrase]
        if phrase and not is_phrase(phrase, self.known):
            raise Unreadable(f"{' '.join(phrase)!r} is no unit")
        if self.next.text == "(" and (phrase or factors or self.position) and self.peek(1).kind == "word":
            start = self.position
            self.position += 1
            inside = []
            while self.next.kind == "word":
                inside.append(self.advance())
            if self.take(")") and is_phrase(inside, self.known):
                if inside[0] in UNITS and not factors and not phrase:
                    factors[UNITS[inside[0]]] = 1
                phrase = phrase or inside
            else:
                self.position = start
        unit = tuple(sorted((name, power) for name, power in factors.items() if power))
        return scale, unit, 0 if not phrase else 2 if phrase[0] != "units" and counts_things(phrase, self.known) else 1

    def unit_product(self, factors: dict[str, int], sign: int) -> bool:
        """Adds units and their powers to `factors`, as `kg`, `m/s^2`, `J/(mol K)`; returns whether it found any."""
        found = False
        while True:
            start = self.position
            square = 1
            if self.next.text in ("square", "sq", "cubic") and self.next.kind == "word":
                square = 3 if self.advance() == "cubic" else 2
                self.take(".")
            self.take(".") if found else None
            token = self.next
            name = UNITS.get(token.text) or UNITS.get(token.text.casefold())
            if name and (token.kind == "word" or (token.text == "Omega" and not found)):
                self.position += 1
                self.take(".")
                power = square * self.unit_power()
                factors[name] = factors.get(name, 0) + sign * power
            elif token.text == "frac" and self.peek(2).kind == "word":
                self.position += 1
                for direction in (1, -1):
                    self.expect("{")
                    if not self.unit_product(factors, sign * direction):
                        raise Unreadable("no unit")
                    self.expect("}")
            elif found and (token.text == "/" or (token.text == "per" and token.kind == "word")):
                self.position += 1
                inner = self.take("(")
                if not self.unit_product(factors, -sign):
                    self.position = start
                    return found
                if inner:
                    self.expect(")")
            elif token.text == "per" and token.kind == "word" and self.next.text == "per":
                self.position = start
                return found
            elif found and token.text == "*":
                self.position += 1
                continue
            else:
                self.position = start
                return found
            found = True

    def unit_power(self) -> int:
        if not self.take("^"):
            return 1
        in_braces = self.take("{")
        sign = -1 if self.take("-") else 1
        if self.next.kind != "number" or not self.next.text.isdigit() or len(self.next.text) > 1:
            raise Unreadable("no power of a unit")
        power = sign * int(self.advance())
        if in_braces:
            self.expect("}")
        return power

    # ----- expressions

    def operand(self) -> Node:
        """One operand of a relation: a sum, a ratio, a time, or a union of sets."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        node = self.name() or self.ratio()
        while operator := self.take("cup", "cap", "setminus"):
            node = ({"cup": "union", "cap": "meet", "setminus": "minus"}[operator], node, self.ratio())
        self.depth -= 1
        return node

    def name(self) -> Node | None:
        r"""The left side of `P(X = 2) =` or `(f \circ g)(x) =`: any symbol or group applied to any group."""
        start = self.position
        end = start
        texts = [token.text for token in self.tokens[start:]]
        if "=" in texts:
            first = self.tokens[start : start + texts.index("=")]
            composed = any(a.kind == "symbol" and b.text == "circ" for a, b in pairwise(first))
            if (composed or texts[:4] == ["frac", "{", "d", "}"]) and all(token.kind != "join" for token in first):
                self.position += len(first)
                return ("named", "".join(token.text for token in first))
        if self.next.text == "(":
            end = self.matching(start) + 1
            composed = any(token.text == "circ" for token in self.tokens[start:end])
            if not composed:
                return None
        elif self.next.kind in ("symbol", "word") or self.next.text in ("mathbb P", "mathbb E", "Pr"):
            end = start + 1
        else:
            return None
        while end < len(self.tokens) and self.tokens[end].text in ("'", "_", "^"):
            if self.tokens[end].text == "'":
                end += 1
            elif end + 1 < len(self.tokens) and self.tokens[end + 1].text == "{":
                end = self.matching(end + 1) + 1
            else:
                end += 2
        if end >= len(self.tokens) or self.tokens[end].text != "(":
            return None
        last = self.matching(end)
        if last + 1 < len(self.tokens) and self.tokens[last + 1].text in ("=", "approx") and last > end + 1:
            self.position = last + 1
            return ("named", "".join(token.text for token in self.tokens[start : last + 1] if token.text not in "{}"))
        return None

    def matching(self, start: int) -> int:
        """The index of the bracket that closes the one at `start`."""
        depth = 0
        for index in range(start, len(self.tokens)):
            text = self.tokens[index].text
            depth += (text in ("(", "[", "{", r"\{")) - (text in (")", "]", "}", r"\}"))
            if depth == 0:
                return index
        raise Unreadable("an open bracket")

    def ratio(self) -> Node:
        parts = [self.sum()]
        while ":" not in self.stops and (self.take(":") or self.take_to()):
            parts.append(self.sum())
        half = self.advance() if self.next.kind == "word" and self.next.text in ("am", "pm") else ""
        if half:
            if not all(part[0] == "number" for part in parts):
                raise Unreadable("no time")
            return ("time", half, *(part[1] for part in parts))
        return parts[0] if len(parts) == 1 else ("ratio", *parts)

    def take_to(self) -> bool:
        """Takes the word `to` of `3 to 4`; returns whether it is there."""
        is_ratio = self.next.kind == "word" and self.next.text == "to" and self.peek(1).kind == "number"
        self.position += is_ratio
        return is_ratio

    def sum(self) -> Node:
        sign = self.take("+", "-", "pm", "mp")
        if sign and self.next.text in ("+", "-"):
            raise Unreadable("two signs")
        first = self.product()
        terms = [_signed(sign, first)]
        while sign := self.take("+", "-", "pm", "mp"):
            if self.next.text in ("+", "-"):
                raise Unreadable("two signs")
            terms.append(_signed(sign, self.product()))
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Node:
        node = self.factor()
        while True:
            if self.take("*"):
                node = ("mul", node, self.signed_factor())
            elif self.next.text == "/" and self.next.kind == "mark":
                if self.peek(1).kind == "word" and len(self.peek(1).text) > 1:
                    return node
                self.position += 1
                node = self.quotient(node)
            elif self.next.text in ("mod", "bmod") and self.next.kind in ("function", "command"):
                self.position += 1
                node = ("call", "mod", node, self.factor())
            elif self.take("circ"):
                raise Unreadable("a composition")
            elif self.starts_factor():
                is_fraction = self.next.text == "frac"
                is_number = self.next.kind == "number" or (self.next.text == "{" and self.peek(1).kind == "number")
                right = self.factor()
                if is_fraction and _is_mixed(node, right):
                    node = ("number", node[1] + _exact(right), None)
                elif (is_number and right[0] == "number" and node != ("constant", "i")) or (
                    node[0] == "number" and right[0] == "number"
                ):
                    raise Unreadable("two numbers side by side")
                else:
                    node = ("mul", node, right)
            else:
                return node

    def quotient(self, node: Node) -> Node:
        """A quotient from left to right; `7 3/4` is a mixed number."""
        right = self.signed_factor()
        return ("div", node, right)

    def signed_factor(self) -> Node:
        return ("neg", self.factor()) if self.take("-") else self.factor()

    def starts_factor(self) -> bool:
        token = self.next
        if token.text == "Omega" and self.tokens[self.position - 1].kind == "number" and self.peek(1) is _END:
            return False
        if token.kind in ("number", "symbol", "function"):
            return True
        if token.kind == "word":
            return False
        if token.text == "|" and token.kind == "mark":
            return self.bars == 0 and "|" not in self.stops
        if token.text == "frac" and self.peek(1).text == "{" and self.peek(2).kind == "word":
            return False
        if token.text == "(" and self.peek(1).text in ("mod", "bmod"):
            return False
        if token.text == "(" and self.peek(1).kind == "word" and len(self.peek(1).text) != 1:
            return False
        if token.text == "(" and self.opens_condition():
            return False
        if token.text in ("_", "^"):
            return False
        return token.kind != "join" and (
            token.text in ("(", "{", "begin pmatrix", "begin bmatrix") or token.text in _OPENERS
        )

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
            elif self.next.text == "'" and node[0] in ("symbol", "apply"):
                self.position += 1
                node = (node[0], node[1] + "'", *node[2:])
                if node[0] == "symbol" and self.next.text == "(":
                    node = ("apply", node[1], *self.arguments())
            elif self.next.text == "_" and node[0] == "number":
                self.position += 1
                node = self.based(node)
            else:
                return node

    def power(self, node: Node) -> Node:
        if self.take("circ", "degree") or (self.next == Token("word", "o") and self.advance()):
            return self.degrees(node)
        if self.next.text == "{" and self.peek(1).text == "circ" and self.peek(2).text == "}":
            self.position += 3
            return self.degrees(node)
        if self.next.text == "*" or (self.next.text == "{" and self.peek(1).text == "*"):
            raise Unreadable("a star")
        if self.next.text == "{" and self.peek(1).text == "'":
            self.position += 1
            primes = ""
            while self.take("'"):
                primes += "'"
            self.expect("}")
            return ("symbol", node[1] + primes) if node[0] == "symbol" else ("marked", primes, node)
        if node[0] == "symbol" and node[1] in FUNCTION_LETTERS and self.is_inverse():
            self.argument()
            return (
                ("apply", node[1] + "^-1", *self.arguments()) if self.next.text == "(" else ("symbol", node[1] + "^-1")
            )
        exponent = ("neg", self.atom()) if self.take("-") else self.argument(whole_numbers=True)
        return ("pow", node, exponent)

    def degrees(self, node: Node) -> Node:
        """The node with the degree sign that follows, of an angle or a temperature."""
        if self.next.text in ("C", "F") and self.peek(1) is _END:
            self.tokens[self.position] = Token("word", "celsius" if self.next.text == "C" else "fahrenheit")
            return node
        return ("degree", node)

    def is_inverse(self) -> bool:
        return [self.peek(offset).text for offset in range(4)] == ["{", "-", "1", "}"]

    def based(self, node: Node) -> Node:
        """A number with its base: `204_5`."""
        if self.take("{"):
            inner = self.take("(")
            text = self.advance()
            if inner:
                self.expect(")")
            self.expect("}")
        else:
            text = self.advance()
        base = int(text) if text.isdigit() and len(text) < 3 else _BASES.get(text, 0)
        if not base:
            raise Unreadable("no base")
        return ("base", str(node[1]), base)

    def argument(self, whole_numbers: bool = False) -> Node:
        """The argument as TeX reads it: a group in braces or one character."""
        if self.take("{"):
            stops, self.stops = self.stops, []
            bars, self.bars = self.bars, 0
            node = self.operand()
            if self.take("over"):
                node = ("div", node, self.operand())
            elif self.take("choose"):
                node = ("call", "binom", node, self.operand())
            self.bars, self.stops = bars, stops
            self.expect("}")
            return node
        token = self.next
        if token.kind == "number" and not whole_numbers and len(token.text) > 1:
            first, rest = token.text[0], token.text[1:]
            if not first.isdigit():
                raise Unreadable("no argument")
            self.tokens[self.position] = Token("number", rest)
            return ("number", Fraction(first), None)
        return self.atom()

    def arguments(self) -> list[Node]:
        """The arguments after a function's name: `(a, b)`."""
        self.expect("(")
        bars, self.bars = self.bars, 0
        stops, self.stops = self.stops, []
        items, _ = self.items()
        self.bars, self.stops = bars, stops
        self.expect(")")
        return [_plain_value(item) for item in items]

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        node = self._atom()
        self.depth -= 1
        return node

    def _atom(self) -> Node:
        token = self.next
        if token.kind == "number":
            return self.number()
        if token.kind == "function":
            return self.function()
        if token.kind == "symbol" or self.is_operand_word():
            return self.symbol()
        if token.kind == "environment":
            return self.environment()
        if token.kind == "word" and token.text in ("constant", "const") and self.peek(-1).text == "+":
            self.position += 1
            self.take(".")
            return ("symbol", "C")
        if token.kind == "word" or token.kind == "join" or token is _END:
            raise Unreadable(f"{token.text or 'the end'!r} where a value should be")
        self.position += 1
        text = token.text
        if text in ("(", "[", "]"):
            return self.group(text)
        if text == r"\{":
            return self.set()
        if text == "{" and self.take("}"):
            return self.atom()  # `{}_8C_4`
        if text == "{":
            self.position -= 1
            return self.argument()
        if text in ("_", "^"):
            top = self.argument(whole_numbers=True)
            if self.next.text not in ("C", "P") or self.peek(1).text != "_":
                raise Unreadable("a script of nothing")
            self.position += 2
            return ("call", "binom" if self.tokens[self.position - 2].text == "C" else "P", top, self.argument(True))
        if text in ("|", r"\|"):
            bars, self.bars = self.bars, 1
            node = self.operand()
            self.bars = bars
            self.expect(text)
            return ("abs", node) if text == "|" else ("call", "norm", node)
        if text in ("lfloor", "lceil"):
            node = self.operand()
            self.expect("rfloor" if text == "lfloor" else "rceil")
            return ("call", "floor" if text == "lfloor" else "ceil", node)
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
        if text == "infty":
            return ("constant", "inf")
        if text == "emptyset":
            return ("set",)
        if text.startswith("mathbb "):
            return self.number_set(text)
        if text == "ldots":
            return ("dots",)
        if text in ("overline", "vec", "hat", "dot", "ddot", "tilde"):
            return self.marked(text)
        if text in ("angle", "triangle", "measuredangle"):
            letters = ""
            while self.next.kind == "symbol":
                letters += self.advance()
            if not letters and self.take("{"):
                while self.next.kind == "symbol":
                    letters += self.advance()
                self.expect("}")
            return self.subscripts("angle " + letters if text != "triangle" else "triangle " + letters)
        if text in ("sum", "prod", "int", "iint", "oint", "lim", "bigcup", "bigcap"):
            return self.big(text)
        raise Unreadable(f"what does {text!r} mean here?")

    def number(self) -> Node:
        text = self.advance()
        if "(" in text:
            whole, _, rest = text.partition(".")
            fixed, _, repeated = rest.rstrip(")").partition("(")
            value = Fraction(f"{whole}.{fixed}0") + Fraction(
                int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed)
            )
            return ("number", value, None)
        mantissa = text.casefold().partition("e")[0]
        if len(mantissa) > 200:
            raise Unreadable("too many digits")
        decimals = len(mantissa.partition(".")[2]) if "." in mantissa else None
        node: Node = ("number", Fraction(text), decimals)
        if decimals is None and self.next.kind == "number" and self.next.spaced and self.peek(1).text == "/":
            bottom = self.peek(2)
            digits = self.next.text.isdigit() and bottom.kind == "number" and bottom.text.isdigit()
            if digits and 0 < int(self.next.text) < int(bottom.text):
                node = ("number", node[1] + Fraction(int(self.next.text), int(bottom.text)), None)
                self.position += 3
        if [self.peek(offset).text for offset in (0, 1, 3)] == ["(", "base", ")"] and self.peek(2).text in _BASES:
            self.position += 4
            return ("base", str(node[1]), _BASES[self.peek(-2).text])
        if self.next.text == "in" and self.peek(1).text == "base":
            self.position += 1
        if self.next.text == "base" and self.next.kind == "word" and self.peek(1).text in _BASES:
            self.position += 1
            base = self.advance()
            return ("base", str(node[1]), _BASES[base])
        return node

    def symbol(self) -> Node:
        name = self.advance()
        if name == "e" and self.next.text != "_":
            return ("constant", "e")
        if name == "pi" and self.next.text != "_":
            return ("constant", "pi")
        if name == "i" and self.next.text != "_":
            return ("constant", "i")
        node = self.subscripts(name)
        if self.next.text == "(" and name in FUNCTION_LETTERS:
            return ("apply", node[1], *self.arguments())
        return node

    def subscripts(self, name: str) -> Node:
        """A symbol with its subscript: `a_{n}` is `a_n`."""
        while self.take("_"):
            if self.next.text == "{":
                end = self.matching(self.position)
                inner = self.tokens[self.position + 1 : end]
                self.position = end + 1
            else:
                inner = [self.next]
                self.position += 1
            name += "_" + "".join(token.text for token in inner if token.text not in ("{", "}"))
        return ("symbol", name)

    def marked(self, mark: str) -> Node:
        if mark == "overline" and not (self.next.text == "{" and self.peek(1).kind == "symbol"):
            node = self.argument()
            return ("call", "conj", node)
        in_braces = self.take("{")
        letters = ""
        while self.next.kind == "symbol" and (in_braces or not letters):
            letters += self.advance()
        node = self.subscripts(f"{mark} {letters}")
        if not letters:
            raise Unreadable("a mark over nothing")
        if in_braces:
            self.expect("}")
        return self.subscripts(node[1])

    def function(self) -> Node:
        name = self.advance()
        if name == "Pr":
            return ("symbol", name)
        power: Node | None = None
        below: Node | None = None
        while self.next.text in ("^", "_"):
            if self.take("^"):
                inverse = self.is_inverse() or (self.next.text == "-" and self.peek(1).text == "1")
                if inverse and name in ("sin", "cos", "tan", "cot", "sec", "csc"):
                    name, _ = (
                        "arc" + name,
                        self.argument() if self.next.text == "{" else (self.advance(), self.advance()),
                    )
                    continue
                power = self.argument()
            else:
                self.position += 1
                below = self.argument(whole_numbers=True)
        arguments, bracketed = self.function_arguments(name)
        node: Node = ("call", name, *arguments) if below is None else ("call", name + "_", below, *arguments)
        if power is not None:
            return ("pow", node, power)
        if bracketed and name in _LOGS and self.next.text == "^":
            self.position += 1
            exponent = self.argument(whole_numbers=True)
            return (*node[:-1], ("pow", node[-1], exponent))
        return node

    def function_arguments(self, name: str) -> tuple[list[Node], bool]:
        if self.next.text == "(":
            return self.arguments(), True
        if self.next.text == r"\{" and name in ("max", "min", "gcd", "lcm"):
            self.position += 1
            node = self.set()
            return list(node[1:]), True
        if not self.starts_factor():
            raise Unreadable(f"{name} of nothing")
        node = self.factor()
        while (self.starts_factor() and self.next.kind != "function" and self.next.text != "(") and not (
            self.next.text == "|" and node[0] == "abs"
        ):
            node = ("mul", node, self.factor())
        return [node], False

    def group(self, opening: str) -> Node:
        bars, self.bars = self.bars, 0
        stops, self.stops = self.stops, []
        items, joins = self.items()
        self.bars, self.stops = bars, stops
        closing = self.take(")", "]", "[")
        if not closing or (opening == "(" and closing == "["):
            raise Unreadable("an open bracket")
        if closing == "[" or opening == "]":  # `]0,2[` is `(0,2)`
            if len(items) != 2:
                raise Unreadable("no interval")
            opening, closing = {"]": "("}.get(opening, opening), {"[": ")"}.get(closing, closing)
        if joins & {"or", "and", "trailing"}:
            raise Unreadable("words in brackets")
        values = [_plain_value(item) for item in items]
        if len(values) == 1 and values[0][0] == "matrix":
            return values[0]
        if len(values) == 1 and (opening, closing) == ("(", ")"):
            return values[0] if values[0][0] != "chain" else ("group", "(", ")", *values)
        return ("group", opening, closing, *values)

    def set(self) -> Node:
        if self.take(r"\}"):
            return ("set",)
        bars, self.bars = self.bars, 0
        stops, self.stops = self.stops, ["|", ":", "mid"]
        items, joins = self.items()
        if self.take("|", ":", "mid"):
            self.stops = []
            conditions, how = self.items()
            self.stops, self.bars = stops, bars
            self.expect(r"\}")
            if len(items) > 1 or ("or" in how and how != {"or"}):
                raise Unreadable("a set of more than one kind")
            if how == {"or"}:
                return ("builder", _plain_value(items[0]), ("either", *(_plain_value(item) for item in conditions)))
            return ("builder", _plain_value(items[0]), *(_plain_value(item) for item in conditions))
        self.stops, self.bars = stops, bars
        self.expect(r"\}")
        if joins & {"or", "and", "trailing"}:
            raise Unreadable("words in brackets")
        return ("set", *(_plain_value(item) for item in items))

    def number_set(self, text: str) -> Node:
        name = text.removeprefix("mathbb ")
        while self.next.text in ("^", "_"):
            mark = self.advance()
            if self.next.text == "{":
                end = self.matching(self.position)
                name += mark + "".join(token.text for token in self.tokens[self.position + 1 : end])
                self.position = end + 1
            else:
                name += mark + self.advance()
        return ("numbers", name)

    def big(self, name: str) -> Node:
        below: Node = ()
        above: Node = ()
        while self.next.text in ("_", "^"):
            if self.take("_"):
                below = self.limits()
            else:
                self.position += 1
                above = self.argument(whole_numbers=True)
        return ("big", name, below, above, self.product())

    def limits(self) -> Node:
        if not self.take("{"):
            return self.argument(whole_numbers=True)
        items, _ = self.items()
        self.expect("}")
        return ("group", "{", "}", *(_plain_value(item) for item in items))

    def environment(self) -> Node:
        name = self.advance().removeprefix("begin ")
        if name not in ("pmatrix", "bmatrix", "matrix", "array", "cases", "vmatrix", "Bmatrix", "smallmatrix"):
            raise Unreadable(f"an environment {name!r}")
        end = self.position
        depth = 1
        while depth and end < len(self.tokens):
            text = self.tokens[end].text
            depth += text.startswith("begin ") - text.startswith("end ")
            end += 1
        if depth:
            raise Unreadable("an open environment")
        rows = [_split(row, "&") for row in _split(self.tokens[self.position : end - 1], r"\\") if row]
        self.position = end
        if not rows:
            raise Unreadable("an empty environment")
        if name == "cases":
            return ("cases", *(tuple(self.cell(cell) for cell in row if cell) for row in rows))
        cells = [[self.cell(cell) for cell in row] for row in rows]
        if name == "vmatrix":
            return ("call", "det", ("matrix", *map(tuple, cells)))
        return ("matrix", *map(tuple, cells))

    def cell(self, tokens: list[Token]) -> Node:
        while tokens and (tokens[-1].text == "," or tokens[0].text in ("if", "for", "when")):
            tokens = tokens[:-1] if tokens[-1].text == "," else tokens[1:]
        claim = _Parser(tokens, self.known).claim() if tokens else None
        if claim is None or len(claim.items) != 1:
            raise Unreadable("a cell with more than one value")
        return _plain_value(claim.items[0])


_END = Token("end", "")
_CONDITIONS = word_set("for where when with provided if given assuming")
_QUANTIFIERS = word_set("all any every some each integer integers constant arbitrary real number numbers")
_AFTER_NO_CHOICE = word_set("/ = ^ * + - ( , ! ' _ < > in no not")
_OPENERS = word_set(
    "frac sqrt binom lfloor lceil infty overline vec hat dot ddot tilde angle triangle sum prod int lim"
)


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
    # Any other would be an unfinished sum.
    return whole and 0 < right[1][1] < right[2][1]


def _exact(quotient: Node) -> Fraction:
    return quotient[1][1] / quotient[2][1]


def _derivative(top: Node, bottom: Node) -> Node | None:
    r"""The symbol for a derivative, `\frac{dy}{dx}`; None for other quotients."""
    if bottom[0] == "mul" and bottom[1] == ("symbol", "d") and bottom[2][0] == "symbol":
        if top == ("symbol", "d"):
            raise Unreadable("a derivative that is not worked out")
        if top[0] == "mul" and top[1] == ("symbol", "d") and top[2][0] == "symbol":
            return ("symbol", f"d{top[2][1]}/d{bottom[2][1]}")
    return None
