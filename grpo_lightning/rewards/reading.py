"""What a short mathematical answer says: its exact value if it is a number, its words, or its LaTeX in one spelling."""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache

MAX_CHARS, MAX_NORMALISED_CHARS, MAX_DIGITS = 2000, 600, 200


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says."""

    text: str
    """Normalised LaTeX."""
    name: str = ""
    """`x` of `x=3`."""
    body: str = ""
    """`3` of `x=3` or `3\\text{ cm}`; else the text."""
    number: Fraction | None = None
    """Its exact value, if it is a plain number."""
    words: str = ""
    """The words, if it is `yes`, `\\text{Monday}` or the choice `(C)`; in lower case."""

    @property
    def is_formula(self) -> bool:
        """Whether only computer algebra can compare it."""
        return self.number is None and not self.words and not LITERAL.fullmatch(self.body)


@lru_cache(maxsize=1 << 16)
def read(answer: str) -> Reading:
    """Reads a gold answer or a model's: one that is too long for an answer, only as text."""
    if _PLAIN.fullmatch(answer):
        return Reading(answer, "", answer, Fraction(answer.replace(",", "")))
    text = normalise(answer[: MAX_CHARS + 1])
    if len(text) > MAX_NORMALISED_CHARS:
        return Reading(text, "", text)
    name, body = "", text
    if named := _NAMED.fullmatch(text):
        *steps, end = (link.strip() for link in named[2].split("="))
        if not any(_is_another_claim(step, end) for step in steps):
            name, body = "".join(named[1].split()), end
    body = without_unit(body)
    number = _short_number(body)
    return Reading(text, name, body, number, "" if number is not None else _words(body))


def normalise(text: str) -> str:
    """One spelling of what LaTeX has many for, without layout, marked units, currency and degree signs."""
    if not text.isascii():
        text = _ROOT.sub(r"\\sqrt{\1}", text)
        text = _SUPERSCRIPTS.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
        text = "".join(c if c.isascii() else _latex_of(c) for c in text)
    text = " ".join(text.split())
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    before, approx, after = text.partition(r"\approx")
    if approx and not _SECOND_CLAIM.search(after.strip()):
        text = f"{before}={after}" if _NAMED.fullmatch(f"{before}=0") else before.strip() or after
    text = " ".join(text.split())
    text = text if text.endswith("..") else text.rstrip(" .,;:")
    return text.removeprefix("**").removesuffix("**").removeprefix("=").strip()


@cache
def _latex_of(character: str) -> str:
    """How LaTeX spells a character: a Greek letter, a fraction, a full-width or any other script's digit."""
    if character in _UNICODE:
        return _UNICODE[character]
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    greek = re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(character, ""))
    if greek:
        return f"\\{greek[2].lower() if greek[1] == 'SMALL' else greek[2].capitalize()} "
    parts = unicodedata.decomposition(character).split()
    plain = "".join(chr(int(part, 16)) for part in parts[1:])
    if parts[:1] == ["<fraction>"]:
        return r"\frac{" + plain.replace("\N{FRACTION SLASH}", "}{") + "}"
    if parts[:1] in (["<wide>"], ["<small>"], ["<font>"]):
        return plain
    return "" if unicodedata.category(character) in ("Cf", "Sc") else character


def canonical(answer: str) -> str:
    """A spelling that answers of equal value share, as far as exact numbers and words can tell."""
    reading = read(answer)
    return str(reading.number) if reading.number is not None else reading.words or reading.body


def same_number(right: Reading, said: Reading) -> bool:
    """Whether two plain numbers are equal, a decimal as far as its digits go."""
    a, b = right.number, said.number
    assert a is not None
    assert b is not None
    if a == b:
        return True
    # What percentage is it? 25, or 25 %. But 0.25 says 25 %, and 0.25 % something else.
    if right.body.endswith("%") != said.body.endswith("%"):
        bare, percent = (b, a) if right.body.endswith("%") else (a, b)
        return abs(bare) >= 1 and bare == 100 * percent
    # 0.0833333333333 is 1/12 as far as it goes; a whole number is never "as far as it goes".
    decimal = "." in right.body or "." in said.body
    return decimal and a.denominator > 1 and b.denominator > 1 and abs(a - b) <= max(abs(a), abs(b)) / 10**10


def without_unit(text: str) -> str:
    """`3 cm` -> `3`."""
    unit = _MARKED_UNIT.fullmatch(text) or _WORD_UNIT.fullmatch(text)
    return unit[1].strip() if unit and not _NOT_A_UNIT.search(unit[2]) else text


def _is_another_claim(step: str, end: str) -> bool:
    """Whether `step = end` claims two things: `1 or x = 2`, `5 = 2`, `5 = 2\\pi`, but not `10/3 = 3.33`."""
    if _SECOND_CLAIM.search(step):
        return True
    number, last = (_short_number(without_unit(link)) for link in (step, end))
    return number is not None and (last is None or abs(number - last) * 100 > abs(last))


def _short_number(text: str) -> Fraction | None:
    return _number(text) if len(text) <= MAX_DIGITS else None


def _number(text: str) -> Fraction | None:
    """The value of an integer, decimal, fraction, mixed number, power or scientific notation."""
    if text.endswith("%"):
        number = _number(text[:-1].rstrip())
        return None if number is None else number / 100
    if text[:1] in ("-", "+"):
        number = _number(text[1:].lstrip()) if text[1:2] not in ("-", "+") else None
        return -number if number is not None and text[0] == "-" else number
    if text[:1] + text[-1:] in ("()", "{}"):
        return _number(text[1:-1].strip())
    if _PLAIN.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if match := _FRACTION.fullmatch(text):
        whole, *parts = match.groups()
        top, bottom = (_number(part.strip()) for part in parts if part is not None)
        if top is None or not bottom or (whole and (top < 0 or bottom < 0)):
            return None
        return Fraction(whole or 0) + top / bottom
    if _SPACED.fullmatch(text):
        return Fraction(text.replace(" ", ""))
    if match := _SLASH.fullmatch(text):
        top, bottom = Fraction(match[2].replace(",", "")), Fraction(match[3].replace(",", ""))
        return Fraction(match[1] or 0) + top / bottom if bottom else None
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa, exponent = match[1] or match[2] or "1", int(match[3] or match[4])
        return Fraction(mantissa.replace(",", "")) * Fraction(10) ** exponent
    if match := _POWER.fullmatch(text):
        base, exponent = int(match[1]), int(match[2] or match[3])
        small = abs(exponent) * len(match[1]) <= MAX_DIGITS
        return Fraction(base) ** exponent if small and (base or exponent > 0) else None
    if match := _REPEATING.fullmatch(text):
        whole, fixed, repeated = match[1] or "0", match[2], match[3]
        return Fraction(f"{whole}.{fixed}0") + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return None


def _words(text: str) -> str:
    match = _MARKED_WORDS.fullmatch(text)
    plain = (match[1] if match else text).strip(" .!")
    if plain[:1] + plain[-1:] == "()":
        plain = plain[1:-1].strip()
    is_words = _WORDS.fullmatch(plain) and (match or _PLAIN_WORDS.search(plain))
    return " ".join(plain.casefold().replace(",", ", ").split()) if is_words and not _FUNCTIONS.search(plain) else ""


_DECIMAL = r"(?:[1-9]\d{0,2}(?:,\d{3}){1,60}(?:\.\d{0,200})?|\d{1,200}(?:\.\d{0,200})?|\.\d{1,200})"
_GROUP = r"(?:\s*\{((?:[^{}]|\{[^{}]*\})*)\}|\s*(\d))"
_PLAIN = re.compile(_DECIMAL, re.ASCII)
_SPACED = re.compile(r"[1-9]\d{0,2}(?: \d{3}){1,60}(?:\.\d{1,200})?", re.ASCII)
_FRACTION = re.compile(rf"(\d+)?\s*\\frac{_GROUP}{_GROUP}", re.ASCII)
_SLASH = re.compile(rf"(?:(\d+)\s+)?({_DECIMAL})\s*/\s*(-?{_DECIMAL})", re.ASCII)
_SCIENTIFIC = re.compile(
    rf"(?:(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*|({_DECIMAL})[eE])"
    r"(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))",
    re.ASCII,
)
_POWER = re.compile(r"(\d+)\s*\^\s*(?:\{\s*(-?\d{1,3})\s*\}|(\d))", re.ASCII)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", re.ASCII)

TEXT_COMMAND = r"\\(?:text|textrm|mbox|hbox|mathrm|rm)\s*"
_MARKED_UNIT = re.compile(rf"(.*?\S)\s*{TEXT_COMMAND}\{{([^{{}}]*)\}}\s*(?:\^\s*\{{?\d\}}?)?")
_UNIT_TAIL = r"[A-Za-z0-9 ,.'/-]*"
_SHORT_UNIT = (
    r"(?:(?<=\d)(?:cm|mm|km|kg|mg)|\s(?:cm|mm|km|ft|mi|yd|kg|mg|lb|oz|m[lL]|hr|m/s))\b"
    rf"{_UNIT_TAIL}(?:\^\s*(?:[23]|\{{\s*[23]\s*\}}))?"
)
_WORD_UNIT = re.compile(rf"(.*?[\d}}%)])(\s+[A-Za-z]{{3}}{_UNIT_TAIL}|{_SHORT_UNIT})")
_NOT_A_UNIT = re.compile(
    r"^\s*-|(?<![\w.^{])(?<!\bof )(?<!\bin )(?<!\bat )(?<!\bby )(?<!\bper )(?<!\bfrom )(?<!\bafter )\d"
    r"|\b(?:or|and|to|than|not|if|wrong|plus|minus|times|over|mod|divided|multiplied|added|squared|cubed"
    r"|factorial|choose|sqrt|sin|cos|tan|log|exp|pi|theta|alpha|beta|one|two|three|four|five|six|seven|eight|nine|tens?"
    r"|hundred|thousand|[mbtr]+illion|dozens?|half|halves|thirds?|quarters?|fourths?|fifths?)\b",
    re.IGNORECASE,
)
_MARKED_WORDS = re.compile(rf"{TEXT_COMMAND}\{{([^{{}}]*)\}}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9 ,.:'-]*")
_FUNCTIONS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|infty|infinity|pi)\b")
_PLAIN_WORDS = re.compile("[A-Za-z]{3}|^[A-J]$|^[Nn][Oo]$")
LITERAL = re.compile(r"\d+(?::\d+)+|\d+_\{?\d+\}?")

_NAME = (
    r"(?:\\text\s*\{[^{}]{1,40}\}|m?\s*\\angle\s*[A-Za-z]{1,3}|\|[A-Z]{2}\||\\overline\s*\{[A-Z]{2}\}"
    r"|\\?[A-Za-z]+(?:_(?:\w|\{[^{}]{1,20}\}))?(?:\([A-Za-z0-9]\))?'*)"
)
NAME_LIST = rf"(?:{_NAME}(?:\s*:\s*{_NAME})*|\(\s*{_NAME}(?:\s*,\s*{_NAME}){{0,8}}\s*\))"
_NAMED = re.compile(rf"({NAME_LIST})\s*(?:=|\\in(?![a-z]))\s*([^=,;]*(?:=[^=,;]*)*|[^=]*)", re.ASCII)

_SECOND_CLAIM = re.compile(
    r"\b(?:or|and)\b|\\(?:lor|land|text|vee|wedge|therefore|implies|iff|to|(?:Left|left)?(?:R|r)ightarrow)(?![a-z])"
    r"|\\\\|[&:]|\.\s|^[^|]*\|[^|]*$|[\d})]\s+[A-Za-z]\w*$"
)

_FONTS = "(?:text|math)(?:bf|it|sf|tt)|boldsymbol|bm|emph|underline"
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!\s*", ""),
        (r"\\,|\\?\$|^\s*\\[(\[]|\\[)\]]\s*$|\\displaystyle", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?", ""),
        (r"(?<!\\)\\[ ;:]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"^\s*(-?\w+)\s*\\over(?![A-Za-z])\s*(\w+)\s*$", r"\\frac{\1}{\2}"),
        (r"^\s*([`\"'])([^`\"']+)\1\s*$", r"\2"),
        (r"\{\s*([,:])\s*\}", r"\1"),
        (r"\\(sin|cos|tan|cot|sec|csc)\s*\^\s*\{\s*-\s*1\s*\}", r"\\arc\1 "),
        (r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree", ""),
        (r"\\(?:color\s*\{\s*\w+\s*\}|textcolor\s*\{\s*\w+\s*\}(?=\s*\{)|checkmark|blacksquare)", ""),
        (r"\\(?:textnormal|textrm|textsf|texttt|mbox|hbox)(?![A-Za-z])", r"\\text"),
        *[(rf"\\(?:{_FONTS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", r"\1")] * 2,
        (r"\\(?:mathrm|text)\s*\{\s*([a-zA-Z]|[-+.\d]*)\s*\}", r"\1"),
        (r"^\s*\\text\s*\{(?![^{}]*\bnot\b)[^{}\d]*(?:\bis|[:=])\s*\}", ""),
        (r"\s*\\text\s*\{\s*(?:percent|\\?%)\s*\}|\s*\b(?:percent(?:age)?|pct)\b|\\%", "%"),
        (r"(?<=[\w})])\*\*(?=[\w({-])", "^"),
        (
            r"[\[(]\s*\\begin\s*\{array\}\s*\{[clr|\s]*\}(.*?)\\end\s*\{array\}\s*[\])]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"\\(begin|end)\s*\{bmatrix\}", r"\\\1{pmatrix}"),
        (r"\\cr(?![a-z])", r"\\\\"),
        (r"\\langle(?![a-z])", "("),
        (r"\\rangle(?![a-z])", ")"),
        (r"\\lbrace(?![a-z])", r"\\{"),
        (r"\\rbrace(?![a-z])", r"\\}"),
        (r"\\[lr]vert(?![a-z])", "|"),
        (r"\\(?:leq?|leqslant)(?![a-z])|<=", r"\\le "),
        (r"\\(?:geq?|geqslant)(?![a-z])|>=", r"\\ge "),
        (r"\\lt(?![a-z])", "<"),
        (r"\\gt(?![a-z])", ">"),
        (r"\\neq?(?![a-z])|!=", r"\\ne "),
        (r"\\varnothing(?![a-z])", r"\\emptyset "),
        (r"\\(?:mathbb|Bbb|mathbf)\s*\{?\s*([RZNQC])(?![A-Za-z])\s*\}?", r"\\mathbb{\1}"),
        (r"\\backslash(?![a-z])", r"\\setminus "),
        (r"\\colon(?![a-z])", ":"),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (r"(\d)\s*:\s*(?=\d)", r"\1:"),
        (r"(?<=\d)_\s*\{\s*(\w+)\s*\}", r"_\1"),
    )
]
_UNICODE = {
    "−": "-", "–": "-", "‐": "-", "﹣": "-", "±": r"\pm ", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ",
    "⋅": r"\cdot ",
    "√": r"\sqrt ", "％": "%", "⁄": "/", "∕": "/", "：": ":", "，": ",", "′": "'",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
    "∅": r"\emptyset ", "∞": r"\infty ", "°": r"^\circ ", "…": r"\ldots ", "∨": r"\lor ", "∧": r"\land ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
}  # fmt: skip
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_ROOT = re.compile(r"√\s*\(?(\d+)\)?")
