"""Cuts an answer into tokens: numbers, symbols, functions, words, commands. LaTeX and plain text give the same."""

import re
import unicodedata
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

from grpo_lightning.plugins.verifier.rules import rewriting, rule
from grpo_lightning.plugins.verifier.units import UNITS
from grpo_lightning.plugins.verifier.words import is_number_word, word_set


class Unreadable(ValueError):
    """The text is no answer that the grammar knows."""


class Token(NamedTuple):
    """One token of an answer: its kind and its text."""

    kind: str
    """`number`, `symbol`, `function`, `word`, `command`, `environment`, `join` (and, or) or `mark` (anything else)."""
    text: str
    spaced: bool = False
    """Whether white space precedes it."""


FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh ln log lg exp gcd lcm "
    "max min arg det sgn Re Im deg mod inf sup Pr"
)
GREEK = word_set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma "
    "tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar"
)
_DROPPED = word_set(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits "
    "nolimits checkmark blacksquare qedhere hline bf it rm mathstrut tiny small normalsize large Large LARGE "
    "huge Huge"
)
_FONTS = word_set("mathbf boldsymbol bm mathit mathsf mathcal mathscr mathfrak underline emph boxed fbox")
_TEXTS = word_set("text textrm textbf textit texttt textsf textnormal mbox hbox mathrm operatorname mathop")
_ALIASES = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge",
    "leqslant": "le", "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne", "varnothing": "emptyset", "lvert": "|",
    "rvert": "|", "vert": "|", "lVert": r"\|", "rVert": r"\|", "Vert": r"\|", "lbrace": r"\{", "rbrace": r"\}",
    "langle": "(", "rangle": ")", "colon": ":", "backslash": "setminus", "times": "*", "cdot": "*", "ast": "*",
    "div": "/", "lor": "or", "vee": "or", "land": "and", "wedge": "and", "dots": "ldots", "cdots": "ldots",
    "dotsc": "ldots", "dotsb": "ldots", "degree": "circ", "lbrack": "[", "rbrack": "]", "bar": "overline",
    "widehat": "hat", "overrightarrow": "vec", "approxeq": "approx", "simeq": "approx", "to": "to",
    "rightarrow": "to", "colonequals": "=", "lfloor": "lfloor", "Bbb": "mathbb", "smallsetminus": "setminus",
    "varepsilon": "epsilon", "varphi": "phi",
    "vartheta": "theta",
}  # fmt: skip
_UNICODE = {
    "−": "-", "–": "-", "‐": "-", "﹣": "-", "±": r"\pm ", "∓": r"\mp ", "×": "*", "÷": "/", "·": "*", "⋅": "*",
    "％": "%", "⁄": "/", "∕": "/", "：": ":", "∶": ":", "，": ",", "、": ",", "′": "'", "’": "'", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
    "∞": r"\infty ", "°": r"^\circ ", "…": r"\ldots ", "∨": r"\lor ", "∧": r"\land ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "≡": r"\equiv ", "→": r"\to ",
    "Ω": r"\Omega ", "—": "-", "\xa0": " ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "∖": r"\setminus ", "⟨": "(", "⟩": ")", "″": "''",
}  # fmt: skip
_SCRIPTS = rewriting(
    "[⁰¹²³⁴-⁹⁺⁻ⁿ]+|[₀-₉]+",
    lambda match: ("_" if match[0][0] in "₀₁₂₃₄₅₆₇₈₉" else "^") + "{" + unicodedata.normalize("NFKC", match[0]) + "}",
    "x² + a₁₂ -> x^{2} + a_{12}",
)
_ROOT = rewriting(
    r"√\s*(\([^()]*\)|\{[^{}]*\}|\d+|\w)",
    lambda match: rf"\sqrt{{{match[1].strip('(){}')}}}",
    r"√ 25 -> \sqrt{25}",
    r"√(x+1) -> \sqrt{x+1}",
)
_CURRENCY = "€£¥¢₹"
_CURRENCY_CODE = rule(r"(USD|US\$|EUR|GBP|INR|Rs)\.?\s*(?=\\?\$?\s*\d)", "«USD »5", "«Rs. »20", "USD")
_CODES = {"USD": "$", "US$": "$", "EUR": "€", "GBP": "£", "INR": "₹", "Rs": "₹"}
_UNIT_FUNCTION = rule(
    r"(?:min|sec|deg)(?![A-Za-z])(?!\s*(?:[({_^\\\d]|[A-Za-z](?![A-Za-z])))",
    "5 «min»",
    "5 «sec» later",
    "min(3, 4)",
    "sec x",
)
"""Minutes, seconds and degrees after a number, if no argument follows that would make them functions."""
_COMPOUND = rule(r"(?:\d{1,2}|[A-Za-z]{3,})(?:-[A-Za-z]{3,})+", "12 «3-digit» numbers", "«twenty-five»", "x-ray", "3-4")

_NUMBER = rule(
    r"""[1-9]\d{0,2}(?:(?:\{,\}|,?\\!\s*|\\,|,(?=\d)|\ )\d{3})+(?![\d,]\d|\d)(?:\.\d+)?
    |(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?![\d.]))?""",
    "«1,234.5»",
    r"«1{,}000»",
    "«1 000»",
    "«2e5»",
    "«12»,«34»",
    flags=re.VERBOSE | re.ASCII,
)
_IN_BRACKETS = rule(
    r"[1-9]\d{0,2}(?:(?:\{,\}|,?\\!\s*|\\,)\d{3})+(?!\d)(?:\.\d+)?|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?![\d.]))?",
    "«3{,}500»",
    "«3»,«500»",
    flags=re.ASCII,
)
_REPEATING = rule(
    r"(\d*)\.(\d*)\\(?:overline|bar|dot|overline\s*\\bar)\s*(?:\{\s*(\d+)\s*\}|(\d))",
    r"«0.1\overline{6}»",
    "0.16",
    flags=re.ASCII,
)
_DOTTED = rule(
    r"(\d*)\.(\d*?)(\d{1,3}?)\3{2,}(?:\.\.\.|\s*\\[lc]?dots(?![a-z]))",
    "«0.333...»",
    r"«2.1666\ldots»",
    "0.33...",
    flags=re.ASCII,
)
_COMMAND = rule(r"\\([A-Za-z]+)\*?|\\(.)", r"«\frac»1«\,»2", "frac", flags=re.DOTALL)
_LETTERS = rule(r"[A-Za-z]+|[^\W\d_]+", "12«abc»3«d»", "12")
_MERIDIEM = rule(r"([ap])\.?\s?m\b\.?", "4:30 «p.m.»", "4«am»", "4 apples", flags=re.IGNORECASE)
_UNIT_FRACTION = rule(r"(?:[kcm]?m|mi|ft|km|kg|g|mi)/(?:s|h|hr|min|m|cm)\b(?!\s*\()", "60 «km/h»", "x/y")
_SPACE = rule(r"(?:\s|~|\\[,:; >!]|\\q?quad(?![A-Za-z])|\\\s)+", r"7« \, »8«~»9", "78")
_TEXT = rule(r"\s+|[^\W\d_]+(?:['-][^\W\d_]+)*|\d|\\.|.", "«5»« »«well-known»« »«Ann's»«!»", flags=re.DOTALL)
SHORT = word_set("of to in is if at on by as an do am pm we he it so")
"""Words of two letters behind a number that are no product."""


@lru_cache(maxsize=1 << 13)
def tokenize(text: str, brackets: bool = True) -> tuple[Token, ...]:
    """The tokens of `text`.

    Args:
        text: An answer, without the box around it.
        brackets: Whether `3,500` inside brackets is two numbers.

    Raises:
        Unreadable: The text has an unknown character or command, or open braces.
    """
    return tuple(_Cutter(plain(text), brackets).cut())


def plain(text: str) -> str:
    """The text in ASCII, except for letters of other scripts."""
    if text.isascii():
        return text
    text = _SCRIPTS(_ROOT(text))
    return "".join(c if c.isascii() else _spelt(c) for c in text)


@cache
def _spelt(character: str) -> str:
    """The LaTeX spelling of a character: a Greek letter, a fraction, a digit of any script."""
    if character in _UNICODE:
        return _UNICODE[character]
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    name = unicodedata.name(character, "").split()
    if name[:1] == ["GREEK"] and len(name) == 4:
        return f"\\{name[3].lower() if name[1] == 'SMALL' else name[3].capitalize()} "
    parts = unicodedata.decomposition(character).split()
    simple = "".join(chr(int(part, 16)) for part in parts[1:])
    if parts[:1] == ["<fraction>"]:
        return r"\frac{" + simple.replace("\N{FRACTION SLASH}", "}{") + "}"
    if parts[:1] in (["<wide>"], ["<small>"], ["<font>"]):
        return simple
    return "" if unicodedata.category(character) in ("Cf", "So") else character


class _Cutter:
    def __init__(self, text: str, brackets: bool) -> None:
        self.text, self.position, self.tokens = text, 0, list[Token]()
        self.brackets, self.depth, self.spaced = brackets, 0, False

    def cut(self) -> list[Token]:
        while self.position < len(self.text):
            if match := _SPACE.match(self.text, self.position):
                self.position, self.spaced = match.end(), True
            else:
                self._next()
        return self.tokens

    def add(self, kind: str, text: str) -> None:
        self.tokens.append(Token(kind, text, self.spaced))
        self.spaced = False

    def after_operand(self) -> bool:
        if not self.tokens:
            return False
        last = self.tokens[-1]
        return last.kind in ("number", "symbol", "word") or last.text in (")", "]", "}", r"\}", "|", "!", "%", "circ")

    def _next(self) -> None:
        text, position = self.text, self.position
        c = text[position]
        if c in "0123456789." and ((self.spaced and self._counted()) or self._number()):
            return
        if c == "\\":
            self._command()
        elif c.isalpha():
            self._letters()
        elif text.startswith("**", position):
            self.position += 2
            after = text[self.position : self.position + 1]
            if self.after_operand() and after and (after.isalnum() or after in "({-"):
                self.add("mark", "^")
        elif c == "'" and self.tokens and self.tokens[-1].kind == "word":
            self.position += 2 if text.startswith("'s", position) else 1
        elif c in _CURRENCY:
            self.position += 1
            self.add("mark", c)
        elif c == "$" or c in '`"':
            self.position += 1
        elif text.startswith("!=", position) and not self.spaced and self._after_number():
            self.position += 1
            self.add("mark", "!")
        elif text.startswith(("<=", ">=", "!=", "=="), position):
            self.position += 2
            self.add("mark", {"<=": "le", ">=": "ge", "!=": "ne", "==": "=="}[text[position : position + 2]])
        elif text.startswith("...", position):
            self.position += 3
            self.add("mark", "ldots")
        elif c in "&+-*/^_=<>|!%'()[]{},;:.":
            self.position += 1
            self._mark(c)
        else:
            raise Unreadable(f"what does {c!r} mean?")

    def _after_number(self) -> bool:
        """Whether `!` can only be a factorial: `6!=720`, not `x!=2`."""
        return bool(self.tokens) and (self.tokens[-1].kind == "number" or self.tokens[-1].text == ")")

    def _counted(self) -> bool:
        """Takes the word `3-digit` in `12 3-digit numbers`; returns whether it is there."""
        match = _COMPOUND.match(self.text, self.position)
        if not match or not self.tokens or self.tokens[-1].kind not in ("number", "word"):
            return False
        self.position = match.end()
        self.add("word", match[0])
        return True

    def _mark(self, c: str) -> None:
        self.depth += (c in ("(", "[", r"\{")) - (c in (")", "]", r"\}"))
        self.add("mark", c)

    def _number(self) -> bool:
        if match := _REPEATING.match(self.text, self.position):
            self.add("number", f"{match[1] or 0}.{match[2]}({match[3] or match[4]})")
        elif match := _DOTTED.match(self.text, self.position):
            self.add("number", f"{match[1] or 0}.{match[2]}({match[3]})")
        else:
            pattern = _IN_BRACKETS if self.depth > 0 and self.brackets else _NUMBER
            match = pattern.match(self.text, self.position)
            if not match:
                return False
            digits = "".join(c for c in match[0] if c.isdigit() or c in ".eE+-")
            if digits.endswith(".") and self.text[match.end() :].strip(" $\\)]}*"):  # `1...`, or the end of a sentence
                self.add("number", digits[:-1])
                self.position = match.end() - 1
                return True
            self.add("number", digits)
        self.position = match.end()
        return True

    def _command(self) -> None:
        match = _COMMAND.match(self.text, self.position)
        if not match:
            raise Unreadable("a lone backslash")
        self.position = match.end()
        if match[1] is None:
            c = match[2]
            if c in "()[]":
                return
            if c == "$":
                self.add("mark", "$")
            elif c in "%|":
                self.add("mark", "%" if c == "%" else r"\|")
            elif c in "{}":
                self._mark("\\" + c)
            elif c == "\\":
                rest = self.text[self.position :].lstrip()
                if rest.startswith("[") and "]" in rest:  # `\\[2pt]`
                    self.position = len(self.text) - len(rest) + rest.index("]") + 1
                self.add("mark", r"\\")
            elif c not in "-/":
                raise Unreadable(f"what does \\{c} mean?")
            return
        name = _ALIASES.get(match[1], match[1])
        if name in ("min", "deg") and self.tokens[-1:] and self.tokens[-1].kind == "number" and self._ends_here():
            self.add("word", name)
        elif name in _DROPPED:
            if name in ("left", "right") and self.text.startswith(".", self.position):
                self.position += 1
        elif name in _FONTS:
            self._font()
        elif name in _TEXTS:
            self._text(name)
        elif name in ("color", "textcolor", "phantom", "vphantom", "hspace", "vspace"):
            self._group()
        elif name in ("begin", "end"):
            self.add("environment", f"{name} {self._group().strip()}")
            if name == "begin" and self.tokens[-1].text == "begin array":
                self._group()
        elif name in ("imath", "jmath"):
            self.add("symbol", name[0])
        elif name in ("prime",):
            self.add("mark", "'")
        elif name == "mathbb":
            self.add("command", "mathbb " + self._group().strip())
        elif name == "pi" or name in GREEK:
            self.add("symbol", name)
        elif name in FUNCTIONS:
            self.add("function", name)
        elif name in ("and", "or"):
            self.add("join", name)
        elif name in ("<", ">", "|", "(", ")", "[", "]", r"\{", r"\}", "=", ":", "*", "/", "le", "ge", "ne"):
            self._mark(name)
        elif name == "cr":
            self.add("mark", r"\\")
        elif name in ("ldots", r"\|"):
            self.add("mark", name)
        else:
            self.add("command", name)

    def _is_unit_function(self, name: str) -> bool:
        """Whether `min`, `sec` or `deg` after a number is a unit: no argument follows that would make it a function."""
        is_behind = bool(self.tokens) and self.tokens[-1].kind == "number"
        return is_behind and bool(_UNIT_FUNCTION.match(f"{name} {self.text[self.position :].lstrip()}"))

    def _ends_here(self) -> bool:
        return not self.text[self.position :].strip(" .$")

    def _font(self) -> None:
        """Takes a group in another font and ignores the font; a bold i is no imaginary unit."""
        content = self._group()
        if content.strip() in ("i", "j", "k", "e", "I"):
            self.add("symbol", "bold " + content.strip())
            return
        self.text, self.position = "{" + content + "}" + self.text[self.position :], 0

    def _group(self) -> str:
        """Takes the braces that follow, or one character; returns the text inside."""
        text, position = self.text, self.position
        while position < len(text) and text[position].isspace():
            position += 1
        if not text.startswith("{", position):
            match = _COMMAND.match(text, position)
            self.position = match.end() if match else position + 1
            return text[position : self.position]
        depth = 0
        for index in range(position, len(text)):
            if text[index] in "{}" and text[index - 1] != "\\":
                depth += 1 if text[index] == "{" else -1
                if depth == 0:
                    self.position = index + 1
                    return text[position + 1 : index]
        raise Unreadable("an open brace")

    def _text(self, name: str) -> None:
        content = self._group()
        bare = content.strip()
        if self._is_unit_function(bare):
            self.add("word", bare)
        elif bare in FUNCTIONS and not (name == "text" and self.after_operand()):
            self.add("function", bare)
        elif name == "mathrm" and (bare in ("e", "i", "d", "E") or (bare[:1] == "\\" and bare[1:].isalpha())):
            self.text, self.position = f"{bare} {self.text[self.position :]}", 0
        elif "$" in bare.replace(r"\$", "") or any(f"\\{font}" in bare for font in _FONTS | _TEXTS):
            self.text, self.position = content + self.text[self.position :], 0
        else:
            self._words(content)

    def _words(self, content: str) -> None:
        """Adds the tokens of a text: each run of letters is a word, the rest is read as in a formula."""
        inner = _Cutter(content, self.brackets)
        inner.spaced = self.spaced
        position = 0
        while position < len(content):
            if match := _MERIDIEM.match(content, position):
                inner.add("word", match[1].casefold() + "m")
                position = match.end()
                continue
            match = _TEXT.match(content, position)
            assert match is not None
            piece = match[0]
            if piece.isspace():
                inner.spaced = True
            elif piece in _CODES and self._before_amount(content[match.end() :]):
                inner.add("mark", _CODES[piece])
                position = match.end()
                while content[position : position + 1] in (".", " "):
                    position += 1
                continue
            elif piece[0].isalpha():
                _add_word(inner, piece)
            elif piece.isdigit() and (self.tokens or inner.tokens) and (counted := _COMPOUND.match(content, position)):
                inner.add("word", counted[0])
                position = counted.end()
                continue
            elif piece == "~" or (piece[0] == "\\" and piece[1:] in (",", ":", ";", "!", " ")):
                inner.spaced = True
            elif piece == "?" or content[match.end() :].strip() or piece not in ".!" or _is_choice(content):
                inner.position = position
                inner.text = content
                inner._next()
                position = inner.position
                continue
            position = match.end()
        self.tokens += inner.tokens
        self.spaced = content[-1:].isspace()

    def _before_amount(self, rest: str) -> bool:
        """Whether a number follows, in the same text or after it."""
        rest = rest.lstrip(" .$\\") or self.text[self.position :].lstrip(" $\\")
        return rest[:1].isdigit()

    def _letters(self) -> None:
        text, position = self.text, self.position
        after = self.after_operand()
        if after and (match := _MERIDIEM.match(text, position)):
            self.position = match.end()
            self.add("word", match[1].casefold() + "m")
            return
        if not after and (match := _CURRENCY_CODE.match(text, position)):
            self.position = match.end()
            self.add("mark", _CODES[match[1]])
            return
        if after and self.tokens[-1].kind == "number" and (match := _UNIT_FUNCTION.match(text, position)):
            self.position = match.end()
            self.add("word", match[0])
            return
        if after and (match := _UNIT_FRACTION.match(text, position)):
            self.position = match.end()
            self._words(match[0])
            return
        match = _LETTERS.match(text, position)
        assert match is not None
        run = match[0]
        hyphenated = _COMPOUND.match(text, position)
        if hyphenated and (after or all(map(is_number_word, hyphenated[0].split("-")))):
            run = hyphenated[0]
        self.position = position + len(run)
        in_phrase = bool(self.tokens) and self.tokens[-1].kind == "word"
        low = run.casefold()
        if run in FUNCTIONS and not in_phrase:
            self.add("function", run)
        elif run in ("sqrt", "pi", "infty", "theta", "frac") and not in_phrase:
            self.add("symbol" if run in ("pi", "theta") else "command", run)
        elif low in ("and", "or"):
            self.add("join", low)
        elif not run.isascii() or in_phrase or (after and (run in UNITS or low in UNITS) and len(run) > 1):
            _add_word(self, run)
        elif len(run) == 1:
            self.add("symbol", run)
        elif _is_word(run, after and self.spaced):
            _add_word(self, run)
        elif run.isupper():
            self.add("symbol", run)
        else:
            for letter in run:
                self.add("symbol", letter)


def _add_word(cutter: _Cutter, word: str) -> None:
    low = word.casefold()
    if low in ("and", "or"):
        cutter.add("join", low)
    elif low in ("percent", "percentage", "pct"):
        cutter.add("mark", "%")
    else:
        cutter.add("word", word)


def _is_choice(text: str) -> bool:
    """Whether a text is the letter of a choice: `B.`."""
    return len(text.strip()) == 2 and text.strip()[0] in "ABCDEFGHIJ" and text.strip()[1] == "."


def _is_word(run: str, behind_number: bool) -> bool:
    """Whether a run of letters is a word and no product."""
    low = run.casefold()
    if low in ("no", "am", "pm", "percent", "pct") or (behind_number and low in SHORT):
        return True
    if len(run) < 3 or (run.isupper() and not behind_number) or not set(low) & set("aeiouy"):
        return False
    return not all(0 < ord(b) - ord(a) <= 2 for a, b in pairwise(low))  # abc, mnp, xyz
