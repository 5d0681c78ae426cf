"""Reads numbers in words: `thirty-six`, `two hundred and five`, `a dozen`, `two thirds`."""

from collections.abc import Iterator, Sequence

from grpo_lightning.plugins.verifier.tokens import Token
from grpo_lightning.plugins.verifier.words import BELOW_100, LARGE, PARTS, word_set

_NO_NUMBER = word_set("each every this that which any no the another per")
"""Words after which `one` is no number: `each one`."""


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
            yield Token("mark", "-", token.spaced) if self.is_sign() else token
            self.position += 1
            if token.kind == "number" and self.word() == "and" and (parts := self.fraction(1)):
                yield from parts  # `2 and a half`

    def is_sign(self) -> bool:
        """Whether `negative three` or `minus 3` begins here."""
        if self.word() not in ("negative", "minus") or self.position + 1 == len(self.tokens):
            return False
        before = self.tokens[self.position - 1] if self.position else None
        is_first = before is None or before.kind == "word" or before.text in ("=", ",", "(", "and", "or", "{")
        return is_first and (self.tokens[self.position + 1].kind == "number" or self.word(1) in BELOW_100)

    def may_start(self) -> bool:
        before = [token.text for token in self.tokens[max(0, self.position - 2) : self.position]]
        is_below = before[-1:] == ["_"] or before == ["_", "{"]
        return not is_below and not (self.word() == "one" and self.word(-1) in _NO_NUMBER)

    def number(self) -> list[Token]:
        if [self.word(offset) for offset in range(3)] == ["half", "a", "dozen"]:
            self.position += 3
            return [Token("number", "6")]
        if parts := self.fraction(0):
            return parts
        start = self.position
        value = self.whole()
        if value is None:
            self.position = start
            return []
        if self.word() in PARTS and 0 < value < 100:
            self.position += 1
            return _quotient(value, PARTS[self.word(-1)])
        number = [Token("number", str(value))]
        return number + self.fraction(1) if self.word() == "and" else number

    def fraction(self, offset: int) -> list[Token]:
        """Takes `a half`, `one third` or `two-thirds` at an offset; returns its tokens, or none."""
        top, _, bottom = self.word(offset).partition("-")
        if top in BELOW_100 and bottom in PARTS:
            self.position += offset + 1
            return _quotient(BELOW_100[top], PARTS[bottom])
        if top in ("a", "one") and self.word(offset + 1) in PARTS:
            self.position += offset + 2
            return _quotient(1, PARTS[self.word(-1)])
        return []

    def whole(self) -> int | None:
        """Takes the whole number that begins here; None if there is none."""
        total, last = 0, 10**15
        while (part := self.below_1000()) is not None:
            scale = LARGE.get(self.word(), 1)
            self.position += scale > 1
            if self.word() == "dozen" and scale == 1 and total == 0:
                self.position += 1
                return part * 12
            if scale >= last:
                return None
            total, last = total + part * scale, scale
            if scale == 1:
                return total
            if self.word() == "and" and self.word(1) in BELOW_100:
                self.position += 1
        return total if last < 10**15 else None

    def below_1000(self) -> int | None:
        if self.word() == "a" and (self.word(1) in ("hundred", "dozen") or self.word(1) in LARGE):
            value = 1
            self.position += 1
        elif self.word() in BELOW_100:
            value = self.below_100()
        else:
            return None
        if self.word() != "hundred":
            return value
        self.position += 1
        more = self.word() == "and" and self.word(1) in BELOW_100
        self.position += more
        return 100 * value + (self.below_100() if self.word() in BELOW_100 else 0)

    def below_100(self) -> int:
        value = BELOW_100[self.word()]
        self.position += 1
        if value >= 20 and value % 10 == 0 and 0 < BELOW_100.get(self.word(), 0) < 10:
            value += BELOW_100[self.word()]
            self.position += 1
        return value


def _quotient(top: int, bottom: int) -> list[Token]:
    return [Token("number", str(top), True), Token("mark", "/"), Token("number", str(bottom))]
