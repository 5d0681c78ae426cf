"""Reads the one value that a sentence claims: 18 of `Janet makes $18 every day`, 42 of `42 (30 boys and 12 girls)`.

Outside of a box an answer is a number or a formula with at most words around it that change nothing. Words do not have
to be known: the few that change a value, and any second number, make the sentence no answer.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from math import prod

from grpo_lightning.plugins.rewards.verifier.grammar import Claim, parse
from grpo_lightning.plugins.rewards.verifier.number_words import in_digits
from grpo_lightning.plugins.rewards.verifier.numbers import literal
from grpo_lightning.plugins.rewards.verifier.tokens import FUNCTIONS, SHORT, Token, Unreadable, tokenize
from grpo_lightning.plugins.rewards.verifier.units import UNITS
from grpo_lightning.plugins.rewards.verifier.words import BOUNDS, changes, take_back, word_set

_LAYOUT = partial(
    re.compile(r"\\(?:text(?:bf|rm|it)?|mathrm|mbox)\s*\{([^{}]*)\}|\\[ ,;!]|~|\*\*|__").sub,
    lambda match: f" {match[1] or ''} ",
)
_COPIED = word_set("in for after when if over during within at of on from with by per all each the")
"""Words with which a phrase begins that may be copied from the question."""
_EXPLAINED = re.compile(r"([^:()]*\d[^:()]*)(?:\(([^()]+)\)|:\s+([^:()]+))")
_VERB = re.compile(r"\s(?:is|are|was|were|be|equals)\s+(?=\S)")
_FORMULA = re.compile(r"\$[^$]*[^$\s\d.,][^$]*\$|\\\(.+?\\\)")
_ODD = re.compile(r"[\d}]!|(?<![\\A-Za-z])[A-Za-z]+\d|\.\.\Z|\d(?:st|nd|rd|th|a)(?![A-Za-z])")
_VARIABLE = re.compile(r"\\(?![$%])|[<>^]|(?<![A-Za-z'])[b-zB-HJ-Z](?![A-Za-z'])")
_TIMES = re.compile(r"(?<!\S)[x×](?=\s\$*\d)")
_MAX_WORDS = 40


@lru_cache(maxsize=1 << 13)
def read_sentence(text: str, question_words: frozenset[str], question: str = "") -> Claim | None:
    """Returns the claim of a sentence with one value, or of a value with its explanation; None for other texts.

    A number with its noun that is copied from the question, as `in 4 weeks`, claims nothing.
    """
    while (plain := _LAYOUT(text)) != text:
        text = plain
    text = _TIMES.sub("*", text)
    words = text.removesuffix(" !").removesuffix(".").split()
    if len(words) > _MAX_WORDS or _ODD.search(text):
        return None
    sentence = _without_copies(words, f" {' '.join(question.casefold().replace('?', ' ').replace('.', ' ').split())} ")
    explained = _EXPLAINED.fullmatch(sentence)
    claim = _claim(explained[1] if explained else sentence, question_words)
    is_explained = not explained or (claim and _explains(explained[2] or explained[3], claim, question_words))
    return claim if is_explained else None


def _without_copies(words: Sequence[str], question: str) -> str:
    """Returns the words without phrases of the question, such as `in 4 weeks` and `if she hires her`."""
    remaining: list[str] = []
    start = 0
    while start < len(words):
        ends = range(len(words), start + 2, -1) if words[start].casefold() in _COPIED else ()
        phrases = (end for end in ends if f" {' '.join(words[start:end]).casefold().rstrip('.')} " in question)
        end = next(phrases, start)
        remaining += words[start : start + 1] if end == start else []
        start = max(end, start + 1)
    return " ".join(remaining if _has_digit(remaining) else words)


def _has_digit(text: Iterable[str]) -> bool:
    return any(c.isdigit() for c in "".join(text))


def _claim(sentence: str, question_words: frozenset[str]) -> Claim | None:
    """Returns the claim of the value after the last `is`, or of all that is no word."""
    verbs = [match.end() for match in _VERB.finditer(sentence)]
    for start in (*(verbs[-1:] if verbs and not _has_digit(sentence[: verbs[-1]]) else ()), 0):
        try:
            tokens = _without_words(in_digits(_tokens(sentence[start:])), question_words)
            return parse(tokens, question_words) if tokens else None
        except (Unreadable, RecursionError):
            continue
    return None


def _tokens(sentence: str) -> list[Token]:
    """Returns the tokens of prose, in which all letters are words, and of formulas between dollar signs."""
    tokens_so_far: list[Token] = []
    start = 0
    for match in (*_FORMULA.finditer(sentence), None):
        prose = sentence[start : match.start() if match else len(sentence)].replace(r"\$", "$").replace("$", r"\$")
        if prose.strip():
            is_formula = _VARIABLE.search(prose)
            tokens = tokenize(prose if is_formula else rf"\text{{{prose}}}")
            tokens_so_far += [
                token._replace(kind="symbol")
                if is_formula and token.kind == "word" and _is_letter("", token.text)
                else token
                for token in tokens
            ]
        if match:
            first_token, *later_tokens = tokenize(match[0])
            tokens_so_far += [first_token._replace(spaced=True), *later_tokens]
        start = match.end() if match else start
    return tokens_so_far


def _without_words(tokens: Sequence[Token], question_words: Collection[str]) -> list[Token]:
    """Returns the tokens without words before the last value; none if a word changes the value."""
    values = [index for index, token in enumerate(tokens) if not _is_word(tokens, index)]
    if not values:
        return []

    # Words may change the value, or be letters of a formula.
    words = _words(tokens)
    words_before = _words(tokens[: values[0]])
    is_changed = changes(words, question_words) or take_back(words_before, question_words)
    if is_changed or any(map(_is_letter, ["", *words], words)) or any(map(_is_factor, tokens, tokens[1:])):
        return []

    # Words before a bracket (`len(5)`) or an operator belong to the value; words before a colon are a label.
    first_value = tokens[values[0]]
    is_called = first_value.text in ("(", "[") and not first_value.spaced
    if words_before and (is_called or first_value.text in tuple("+*/^%")):
        return []
    start = values[0] + 1 if words_before and first_value.text in ("=", ":") else 0
    return [token for index, token in enumerate(tokens) if index >= start and (index > values[-1] or index in values)]


def _words(tokens: Iterable[Token]) -> list[str]:
    """Returns the texts of the tokens that are words."""
    return [token.text for token in tokens if token.kind == "word"]


def _is_letter(previous: str, word: str) -> bool:
    """Tells whether a word is a letter, as of a formula, or a function."""
    return word in FUNCTIONS or (len(word) == 1 and word.isalpha() and word not in "aAI" and previous != "of")


def _is_factor(previous: Token, token: Token) -> bool:
    """Tells whether two letters behind a number may be a product: `2 ab`."""
    is_pair = token.kind == "word" and len(token.text) == 2 and token.text.isalpha()
    return is_pair and previous.kind == "number" and token.text not in UNITS and token.text.casefold() not in SHORT


def _is_word(tokens: Sequence[Token], index: int) -> bool:
    """Tells whether a token is a word but no unit of an equation; also a comma or an `and` between words."""
    token, next_tokens = tokens[index], tokens[index + 1 : index + 2]
    if token.kind == "word":
        return token.text not in UNITS or all(neighbour.text not in ("=", "^", "/", "or") for neighbour in next_tokens)
    around = [neighbour.kind == "word" for neighbour in (*tokens[max(0, index - 1) : index], *next_tokens)]
    is_between = token.text in (",", "and", "'") or (token.kind == "symbol" and len(token.text) == 1)
    return is_between and len(around) == 2 and all(around)


def _explains(text: str, claim: Claim, question_words: Collection[str]) -> bool:
    """Tells whether a text in brackets or after a colon has no number, or numbers whose sum or product is the value."""
    value = literal(claim.items[0].value)
    try:
        tokens = in_digits(_tokens(text.removeprefix("or ").removeprefix("i.e. ")))
    except Unreadable:
        return False
    texts = [token.text for token in tokens]
    words = _words(tokens)
    marks = {token.text for token in tokens if token.kind not in ("word", "number")}
    numbers = [
        Fraction(token.text) * (-1 if previous == "-" else 1)
        for previous, token in zip(["", *texts], tokens, strict=False)
        if token.kind == "number" and "(" not in token.text
    ]
    is_bound = bool(numbers) and not BOUNDS.isdisjoint(words)
    if value is None or marks - {*",+-*=$%", "and"} or changes(words, question_words) or is_bound:
        return False
    terms = numbers[:-1] if "=" in marks and numbers[-1:] == [value] else numbers
    return terms in ([], [value]) or sum(terms) == value or prod(terms) == value
