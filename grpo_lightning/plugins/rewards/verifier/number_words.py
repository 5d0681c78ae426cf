"""Reads numbers in words: `thirty-six`, `two hundred and five`, `a dozen`, `two thirds`."""

from collections.abc import Sequence

from grpo_lightning.plugins.rewards.verifier.tokens import Token
from grpo_lightning.plugins.rewards.verifier.words import BELOW_100, LARGE, PARTS, SCALES, word_set

_NO_NUMBER = word_set("each every this that which any no the another per")
"""Words before a `one` that is no number: `each one`."""


def in_digits(tokens: Sequence[Token]) -> list[Token]:
    """Returns the tokens with every number in words replaced by one in digits.

    A word that only scales (`5 million`) stays. So does a word that counts nothing (`each one`).
    """
    words = [token.text.casefold() if token.kind in ("word", "join") or token.text in "aA" else "" for token in tokens]
    digits: list[Token] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        is_counted = not (words[position] == "one" and position and words[position - 1] in _NO_NUMBER)
        is_script = any(token.text == "_" for token in tokens[max(0, position - 2) : position])
        number, end = _number(words, position) if is_counted and not is_script else ([], position)
        if number:
            digits += [number[0]._replace(spaced=token.spaced), *number[1:]]
        else:
            digits.append(Token("mark", "-", token.spaced) if _is_sign(tokens, words, position) else token)
            end = position + 1
        if words[end : end + 1] == ["and"] and digits[-1].kind == "number":  # `2 and a half`
            fraction, fraction_end = _fraction(words, end + 1)
            digits, end = [*digits, *fraction], fraction_end if fraction else end
        position = end
    return digits


def _is_sign(tokens: Sequence[Token], words: Sequence[str], position: int) -> bool:
    """Tells whether `negative three` or `minus 3` begins here."""
    if words[position] not in ("negative", "minus") or position + 1 == len(tokens):
        return False
    previous = tokens[position - 1] if position else Token("word", "")
    is_first = previous.kind in ("word", "join") or previous.text in ("=", ",")
    return is_first and (tokens[position + 1].kind == "number" or words[position + 1] in BELOW_100)


def _number(words: Sequence[str], start: int) -> tuple[list[Token], int]:
    """Returns the tokens of the number that begins at `start`, and its end; none if there is no number."""
    fraction, end = _fraction(words, start)
    if fraction:
        return fraction, end
    # The group is the number that the next thousand or million multiplies; these become smaller.
    total = group = 0
    last_scale, end = 10**15, start
    while end < len(words):
        word = words[end]
        next_word = words[end + 1] if end + 1 < len(words) else ""
        room = 100 if group % 100 == 0 else 10 if group % 10 == 0 and group % 100 >= 20 else 0
        if word in BELOW_100 and BELOW_100[word] < room and (end == start or BELOW_100[word]):
            group += BELOW_100[word]
        elif word == "a" and end == start and next_word in SCALES:
            group = 1
        elif word in ("hundred", "dozen") and 0 < group < 100:
            group *= SCALES[word]
        elif word in LARGE and group > 0 and LARGE[word] < last_scale:
            last_scale = LARGE[word]
            total += group * last_scale
            group = 0
        elif not (word == "and" and next_word in BELOW_100 and end > start and words[end - 1] in SCALES):
            break
        end += 1
    if end < len(words) and words[end] in PARTS and 0 < total + group < 100:
        return _quotient(total + group, PARTS[words[end]]), end + 1
    return ([Token("number", str(total + group))] if end > start else []), end


def _fraction(words: Sequence[str], start: int) -> tuple[list[Token], int]:
    """Returns the tokens of `a half`, `one third` or `two-thirds` at `start`, and their end."""
    top, _, bottom = words[start].partition("-") if start < len(words) else ("", "", "")
    if top in BELOW_100 and bottom in PARTS:
        return _quotient(BELOW_100[top], PARTS[bottom]), start + 1
    if top in ("a", "one") and start + 1 < len(words) and words[start + 1] in PARTS:
        return _quotient(1, PARTS[words[start + 1]]), start + 2
    return [], start


def _quotient(top: int, bottom: int) -> list[Token]:
    return [Token("number", str(top), True), Token("mark", "/"), Token("number", str(bottom))]
