"""Reads numbers in words: `thirty-six`, `two hundred and five`, `a dozen`, `two thirds`."""

from collections.abc import Iterator, Sequence

from grpo_lightning.plugins.verifier.tokens import Token
from grpo_lightning.plugins.verifier.units import word_set

_SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_BELOW_100 = {word: value for value, word in enumerate(_SMALL)}
_BELOW_100 |= {word: 20 + 10 * index for index, word in enumerate(_TENS)}
_BELOW_100 |= {f"{ten}-{one}": _BELOW_100[ten] + _BELOW_100[one] for ten in _TENS for one in _SMALL[1:10]}
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ORDINALS = [
    "half", "third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
]  # fmt: skip
_PARTS = {word: value for value, word in enumerate(_ORDINALS, 2)}
_PARTS |= {f"{word}s": value for word, value in _PARTS.items()}
_PARTS |= {"halves": 2, "fourth": 4, "fourths": 4, "twentieth": 20, "twentieths": 20, "hundredth": 100}
_PARTS |= {"hundredths": 100, "thousandth": 1000, "thousandths": 1000}
_NO_NUMBER = word_set("each every this that which any no the another per")
"""Words after which `one` is no number: `each one`."""


def is_spelt(word: str) -> bool:
    """Whether a word, hyphenated or not, is a number: `thirty-six`, `two-thirds`."""
    low = word.casefold()
    return low in _BELOW_100 or low in ("hundred", "dozen") or low in _LARGE or _is_fraction(low)


def _is_fraction(low: str) -> bool:
    top, _, bottom = low.partition("-")
    return top in _BELOW_100 and bottom in _PARTS


def in_digits(tokens: Sequence[Token]) -> list[Token]:
    """The tokens with every number in words replaced by one in digits.

    A word that only scales (`5 million`) stays. So does a word that counts nothing (`each one`).
    """
    return list(_Reader(tokens).replaced())


class _Reader:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.position = tokens, 0

    def word(self, offset: int = 0) -> str:
        """The word at an offset, in lower case; empty if the token is no word."""
        index = self.position + offset
        if not 0 <= index < len(self.tokens):
            return ""
        token = self.tokens[index]
        return token.text.casefold() if token.kind in ("word", "join") or token.text in ("a", "A") else ""

    def replaced(self) -> Iterator[Token]:
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            found = self.number() if self.may_start() else []
            if found:
                yield found[0]._replace(spaced=token.spaced)
                yield from found[1:]
                continue
            if self.is_sign():
                token = Token("mark", "-", token.spaced)
            yield token
            self.position += 1
            if token.kind == "number" and self.word() == "and" and (parts := self.fraction(1)):
                yield from parts  # `2 and a half`

    def is_sign(self) -> bool:
        """Whether `negative three` or `minus 3` begins here."""
        if self.word() not in ("negative", "minus") or self.position + 1 == len(self.tokens):
            return False
        before = self.tokens[self.position - 1] if self.position else None
        after = self.tokens[self.position + 1]
        is_first = before is None or before.kind == "word" or before.text in ("=", ",", "(", "and", "or", "{")
        return is_first and (after.kind == "number" or self.word(1) in _BELOW_100)

    def may_start(self) -> bool:
        before = self.tokens[self.position - 1] if self.position else None
        is_below = before is not None and (
            before.text == "_"
            or (before.text == "{" and self.position > 1 and self.tokens[self.position - 2].text == "_")
        )
        return not is_below and not (self.word() == "one" and self.word(-1) in _NO_NUMBER)

    def number(self) -> list[Token]:
        start = self.position
        if self.word() == "half" and self.word(1) == "a" and self.word(2) == "dozen":
            self.position += 3
            return [Token("number", "6")]
        if parts := self.fraction(0):
            return parts
        value = self.whole()
        if value is None:
            self.position = start
            return []
        if self.word() in _PARTS and 0 < value < 100:
            self.position += 1
            return _quotient(value, _PARTS[self.tokens[self.position - 1].text.casefold()])
        number = [Token("number", str(value))]
        return number + self.fraction(1) if self.word() == "and" else number

    def fraction(self, offset: int) -> list[Token]:
        """Takes `a half`, `one third` or `two-thirds` at an offset; returns its tokens, or none."""
        first, second = self.word(offset), self.word(offset + 1)
        if _is_fraction(first):
            self.position += offset + 1
            top, _, bottom = first.partition("-")
            return _quotient(_BELOW_100[top], _PARTS[bottom])
        if first in ("a", "one") and second in _PARTS and second != "seconds":
            self.position += offset + 2
            return _quotient(1, _PARTS[second])
        return []

    def whole(self) -> int | None:
        """Takes the whole number that begins here; None if there is none."""
        total, last = 0, 10**15
        start = self.position
        while True:
            part = self.below_1000()
            if part is None:
                break
            scale = _LARGE.get(self.word(), 1)
            self.position += scale > 1
            if self.word() == "dozen" and scale == 1 and total == 0:
                self.position += 1
                return part * 12
            if scale >= last:
                self.position = start
                return None
            total, last = total + part * scale, scale
            if scale == 1:
                break
            if self.word() == "and" and self.word(1) in _BELOW_100:
                self.position += 1
        return total if self.position > start else None

    def below_1000(self) -> int | None:
        word = self.word()
        if word == "a" and (self.word(1) in ("hundred", "dozen") or self.word(1) in _LARGE):
            value = 1
            self.position += 1
        elif word in _BELOW_100:
            value = self.below_100()
        else:
            return None
        if self.word() != "hundred":
            return value
        self.position += 1
        value *= 100
        more = self.word() == "and" and self.word(1) in _BELOW_100
        if more or self.word() in _BELOW_100:
            self.position += more
            value += self.below_100()
        return value

    def below_100(self) -> int:
        value = _BELOW_100[self.word()]
        self.position += 1
        if value >= 20 and value % 10 == 0 and 0 < _BELOW_100.get(self.word(), 0) < 10:
            value += _BELOW_100[self.word()]
            self.position += 1
        return value


def _quotient(top: int, bottom: int) -> list[Token]:
    return [Token("number", str(top), True), Token("mark", "/"), Token("number", str(bottom))]
