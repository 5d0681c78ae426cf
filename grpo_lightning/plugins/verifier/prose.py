"""Reads the one number that a sentence claims: 18 of `Janet makes $18 every day`, 42 of `42 (30 boys and 12 girls)`.

The sentence must have one number, and all its words must come from the question or from short lists. Words that take
a value back (`not`, `almost`, `or`) are never allowed, even if the question has them.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import zip_longest
from math import prod

from grpo_lightning.plugins.verifier.grammar import DENIALS, LABELS, Claim, read_claim
from grpo_lightning.plugins.verifier.number_words import in_digits, is_spelt
from grpo_lightning.plugins.verifier.numbers import exact, literal
from grpo_lightning.plugins.verifier.rules import rewriting, rule
from grpo_lightning.plugins.verifier.spellings import are_amounts
from grpo_lightning.plugins.verifier.tokens import Token, Unreadable, tokenize
from grpo_lightning.plugins.verifier.units import HEDGES, SCALES, UNITS, is_noun, is_number_word, word_set

_SHORT = word_set(
    "a an the of in on at for to from with by per each every all both his her hers its their our my your this that "
    "these those he she it they we you i him them us there is are was were be been will would can has have had do does "
    "did so then now total totals altogether together left remaining only just exactly overall after before during "
    "today daily weekly monthly yearly annually apiece more: needs need makes make made gets get got earns earned pays "
    "paid spends spent costs cost saves saved sells sold buys bought eats ate drinks drank uses used takes took gives "
    "gave keeps kept reads read runs ran walks walked drives drove works worked receives received owes owed wins won "
    "loses lost drew wrote go goes went see sees saw should must equals answer final result therefore "
    "thus hence means what ones"
)
_ROUGHLY = word_set("about approximately roughly around")
_BOUNDS = word_set("over past beyond within until till before upto")
_COMPARATIVES = word_set(
    "more fewer less extra additional older younger taller shorter longer wider deeper farther further faster slower "
    "higher lower bigger larger smaller heavier lighter"
)
_COMPARED = _COMPARATIVES | {"many", "much"}
_TAKEN_BACK = (
    DENIALS
    | (HEDGES - {"and", "to", "about", "approximately", "roughly", "over", "through"})
    | word_set(
        "could might may guess guessing think believe suppose assume wonder doubt hope bet try up down again "
        "off half twice double doubled tripled also too hardly barely scarcely"
    )
)
_SUPERLATIVES = word_set("maximum minimum most least first last largest smallest")
_CLAUSE = rule(
    r"(?<=\s)(?:between|in|on|at|for|of|to|from|with|by|if|when|after|before|during|over|than|that|who|which|within|while|"
    r"because|are|is|were|was|do|did|will|have|has) (?=\S+ \S+)",
    "18 «if »she hires her",
    "18 in total",
)
_COPIED = rule(
    r"((?:\b(?:in|over|for|after|within|during|per|at|of|on|to|from|by|with|all|the|first|last|next)\s+|^))"
    r"(\$?\d[\d,.]*|[a-z]+(?:-[a-z]+)?)\s+((?!(?:and|or)\b)[a-z]+)",
    "«7 apples» «in 4 weeks»",
    "7",
    flags=re.IGNORECASE,
)
_NUMBER = rule(r"-?(?:\\?[$€£¥₹])?-?\.?\d|-?\\[dt]?frac|\\?[$€£¥₹]\Z|[A-Za-z]", "«-.5»", "«$1»", "?")
_NAMED = rule(
    r"(?:the )?(\w+(?: [\w'’-]+){3,20}) (?:is|are|was|were|will be) (?=\S+\Z)",
    "«The number of apples she ate is »7",
    "The total is 7",
    flags=re.IGNORECASE,
)
_BEFORE_UNIT = word_set("a an the per each every this that of in for by than")
"""Words before a unit that is not the unit of the value."""
_EACH = word_set("at each per for times x of every by")
_IN_SUMS = _EACH | {"and", "a", "A"}
_MARKS = frozenset("+-*/=,")
_WITHOUT_TEXT = rewriting(
    r"\\(?:text(?:bf|rm|it)?|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", r"\text{about} 7 ->  about  7"
)
_WORD = rule(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", "«well-known»", "«Ann's»", "7")
_EXPLAINED = rule(r"([^:()]+)(?:\(([^()]+)\)|:\s+([^:()]+))", "«42 (30 boys and 12 girls)»", "«42: 30 + 12»", "42")
_DIGIT = rule(r"\d", "«1»«8» apples", "none")
_OTHER_NUMBER = rule(r"\bor\b.*\d", "in 4 «or in 5» weeks", "more than 5")
_WITHOUT_DOZEN = rewriting(r"(?<=\d)\s*dozens?\b(?:\s+of\b)?", "", "3 dozen of eggs -> 3 eggs")
_WITHOUT_LAYOUT = rewriting(r"\\[ ,;!]|~|\*\*|__", " ", r"5\,kg~each -> 5 kg each")
_ONE_SPACE = rewriting(r"\s+", " ", "7   apples -> 7 apples")
_TIMES = rewriting(r"(?<=\d)\s*[x×]\s*(?=\$?\d)", " * ", "3 x $4 -> 3 * $4", "3×4 -> 3 * 4", "3 x -> 3 x")
_AMOUNT = rule(r"\$?\d", "she earns «$9»", "she earns")
_OPERATOR = rule(r"[-+*/]", "9 «*» 2", "92")
_STEM_Y = rewriting(r"(?:ies|ied)\Z", "y", "studied -> study")
_WITHOUT_ENDING = rewriting(r"(?:ing|ed|es|s|e|d)\Z", "", "baking -> bak", "apples -> appl")
_MAX_WORDS = 40


@lru_cache(maxsize=1 << 13)
def read_sentence(text: str, known: frozenset[str], question: str = "") -> Claim | None:
    """The claim of a sentence with one number, or of a number with its explanation; None for other texts.

    Args:
        text: The answer.
        known: The words of the question.
        question: The question. Text copied from it claims nothing.
    """
    plain = _plain(text)
    if len(plain.split()) > _MAX_WORDS:
        return None
    plain = _without_copies(plain, " ".join(question.replace("’", "'").casefold().split()))
    explained = _EXPLAINED.fullmatch(plain)
    if not explained:
        return _claim(plain, known)
    claim = _claim(explained[1], known)
    value = _value(claim)
    if claim is None or value is None:
        return None
    inside = explained[2] or explained[3]
    return claim if _explains(inside, value, known) or _converts(explained[1], inside, known) else None


def _without_copies(text: str, question: str) -> str:
    """The text without a clause of the question (`if she hires her`) and without its numbers (`in 4 weeks`)."""
    named = _NAMED.match(text)
    if named and named[1].casefold() in question:
        text = text[named.end() :]
    low = text.casefold()
    for match in _CLAUSE.finditer(low):
        clause = low[match.start() :]
        if clause in question and _DIGIT.search(low[: match.start()]) and not _OTHER_NUMBER.search(clause):
            text = text[: match.start()].rstrip()
            break
    bare = _COPIED.sub(lambda match: _without_number(match, question, "=" in text), text)
    text = bare if _DIGIT.search(bare) else text
    return _WITHOUT_DOZEN(text) if "how many dozen" in question else text


def _without_number(match: re.Match[str], question: str, in_sum: bool) -> str:
    """`in weeks` for `in 4 weeks`, if the question has number and word; a sum keeps its first number."""
    is_copied = f"{match[2]} {match[3]}".casefold() in question and (match[1] or not in_sum)
    return match[1] + match[3] if is_copied else match[0]


def _plain(text: str) -> str:
    """The text without commands for layout."""
    while (inner := _WITHOUT_TEXT(text)) != text:
        text = inner
    text = _WITHOUT_LAYOUT(text).replace("–", "-").replace("’", "'").strip()
    text = _ONE_SPACE(text)
    text = _TIMES(text)
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def _claim(sentence: str, known: frozenset[str]) -> Claim | None:
    """The claim of words, one value and words, or of words, a sum, its result and words; None for others."""
    if "=" in sentence:
        calculation, _, result = sentence.rpartition("=")
        return _sum_claim(calculation, result, known)
    pieces = sentence.split()
    start = 0
    while start < len(pieces) and (word := _word(pieces[start])) and not is_spelt(word):
        start += 1
    if start < len(pieces) and start and pieces[start] in SCALES and pieces[start - 1] == "a":
        start -= 1
    frame, rest = pieces[:start], pieces[start:]
    if frame and frame[-1].casefold() in _ROUGHLY:
        frame = frame[:-1]
    if not rest or not _NUMBER.match(rest[0]) or not _are_allowed(frame, known):
        return None
    last = [piece.casefold() for piece in frame[-2:]]
    if last and (last[-1] in _BOUNDS or (last[-1] == "of" and last[0] not in LABELS | {"average"})):
        return None
    for cut in range(len(rest), 0, -1):
        if not _may_follow(rest[cut:], known):
            continue
        claim = _read(" ".join(rest[:cut]), known)
        if _value(claim) is not None:
            return claim
    return None


def _sum_claim(calculation: str, result: str, known: frozenset[str]) -> Claim | None:
    """The claim of `she earns 9 * 2` and `18 every day`: the result, if it is one."""
    claim = _claim(result, known)
    value = _value(claim)
    start = _AMOUNT.search(calculation)
    if value is None or not start or not _OPERATOR.search(calculation):
        return None
    is_one = _are_allowed(calculation[: start.start()].split(), known)
    return claim if is_one and _explains(calculation[start.start() :], value, known) else None


def _read(text: str, known: frozenset[str]) -> Claim | None:
    try:
        return read_claim(text, known)
    except Unreadable:
        return None


def _value(claim: Claim | None) -> Fraction | None:
    """The number, if the claim is one; else None."""
    if claim is None or len(claim.items) > 1 or claim.joins:
        return None
    _, operators, operands = claim.items[0].chain
    value = operands[-1][1] if operands[-1][0] in ("degree", "percent") else operands[-1]
    return literal(value) if not set(operators) - {"="} else None


def _word(piece: str) -> str:
    """The word of a piece, without a comma after it; empty if the piece is no word."""
    piece = piece.rstrip(",'")
    return piece if _WORD.fullmatch(piece) else ""


def is_allowed(piece: str, known: frozenset[str]) -> bool:
    """Whether a word is allowed in a sentence beside its value."""
    low = _word(piece).casefold()
    bare = low.removesuffix("'s").removesuffix("'")
    if not low or bare in _TAKEN_BACK or is_number_word(bare):
        return False
    return bare in _SHORT or _stem(bare) in _stems(known)


def _are_allowed(frame: Sequence[str], known: frozenset[str]) -> bool:
    """Whether words are allowed before a value: `The maximum number of boxes is`."""
    before = ["", "", *(_word(piece).casefold() for piece in frame)]
    return all(
        is_allowed(piece, known)
        or (_is_name(piece) and index + 1 < len(frame) and (before[index + 3] in _SHORT or before[index + 3] == "and"))
        or (low in LABELS and len(low) > 1)
        or (low == "and" and 0 < index < len(frame) - 1)
        or (low in _SUPERLATIVES and low in known and before[index + 1] == "the" and before[index] != "at")
        for index, (piece, low) in enumerate(zip(frame, before[2:], strict=True))
    )


def _is_name(piece: str) -> bool:
    """Whether a piece may be a name: a capitalised word that neither takes a value back nor is an adverb."""
    low = _word(piece).casefold().removesuffix("'s")
    return (
        piece[:1].isupper()
        and bool(low)
        and low not in _TAKEN_BACK
        and not low.endswith("ly")
        and not is_number_word(low)
    )


@lru_cache(maxsize=1 << 10)
def _stems(known: frozenset[str]) -> frozenset[str]:
    return frozenset(map(_stem, known))


def _stem(word: str) -> str:
    """The common stem of the forms of a word: `bak` of bakes, baked and baking."""
    word = _STEM_Y(word)
    word = _WITHOUT_ENDING(word) if len(word) > 3 else word
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word


def _may_follow(words: Sequence[str], known: frozenset[str]) -> bool:
    """Whether the words after a value leave it unchanged: `every day at the market`, `more apples than Jane`."""
    low = [piece.casefold() for piece in words]
    compared = False
    for index, word in enumerate(low):
        before = low[index - 1] if index else ""
        rest = low[index + 1 :]
        if word in _COMPARATIVES:
            fits = before not in ("and", "than", "a")
            compared = True
        elif word == "times":
            fits = not index and ("times" in known or rest[:1] == ["as"])
            compared = True
        elif word in ("than", "as", "many", "much"):
            fits = compared
        elif word == "and":
            fits = bool(index and rest) and rest[0] not in _COMPARATIVES
        elif compared and (_is_name(words[index]) if before in ("than", "as") else before in _COMPARED):
            fits = before in ("than", "as") or (rest[:1] in ([], ["than"], ["as"]) and is_noun(word, known))
        elif word in UNITS:
            fits = before in _BEFORE_UNIT
        else:
            fits = is_allowed(words[index], known)
        if not fits:
            return False
    return True


def _explains(text: str, value: Fraction, known: frozenset[str]) -> bool:
    """Whether the text in brackets or after a colon explains a value and names no other one."""
    try:
        tokens = in_digits(tokenize(text.removeprefix("or ")))
    except Unreadable:
        return False
    tokens = [token for token, after in zip_longest(tokens, tokens[1:]) if not _is_rate(token, after)]
    words = [token.text for token in tokens if token.kind in ("word", "join", "symbol")]
    if not all(word in _IN_SUMS or is_allowed(word, known) or is_noun(word, known) for word in words):
        return False
    if not all(token.kind in ("number", "word", "join", "symbol") or token.text in _MARKS for token in tokens):
        return False
    links = " ".join(_sign(token) for token in tokens).split("=")
    numbers = [part for link in links for part in link.split() if part not in _MARKS]
    if len(links) > 1 or any(mark in links[0].split() for mark in "+-*/"):
        return all(_result(link) == value for link in links)
    parts = [Fraction(number) for number in numbers if "(" not in number]
    if len(parts) < 2:
        return parts in ([], [value])
    return sum(parts) == value or (bool(_EACH & {*words}) and prod(parts) == value)


def _is_rate(token: Token, after: Token | None) -> bool:
    """Whether a token is a percent sign or the slash of `$10/week`, which a sum ignores."""
    return token.text == "%" or (token.text == "/" and after is not None and after.kind == "word")


def _result(text: str) -> Fraction | None:
    """The value of a sum; None if it has none."""
    claim = _read(text, frozenset())
    return exact(claim.items[0].chain[2][0]) if claim and len(claim.items) == 1 else None


def _converts(text: str, inside: str, known: frozenset[str]) -> bool:
    """Whether the text in brackets is the same amount in another unit: `90 minutes (1.5 hours)`."""
    claim = _read(f"{text} = {inside.removeprefix('or ').removeprefix('= ')}", known)
    return claim is not None and len(claim.items) == 1 and bool(claim.items[0].amounts) and are_amounts(claim.items[0])


def _sign(token: Token) -> str:
    """The text of a token in a sum; empty for a word."""
    if token.text == "x":
        return "*"
    return token.text if token.kind == "number" or token.text in "+-*/=" else ""
