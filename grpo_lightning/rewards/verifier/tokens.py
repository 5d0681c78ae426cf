"""Cuts an answer into tokens: numbers, symbols, functions, words, commands. LaTeX and plain text come out alike."""

import re
import unicodedata
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

from grpo_lightning.rewards.verifier.units import UNITS, is_number_word, word_set


class Unreadable(ValueError):
    """The text is no answer that the grammar knows."""


class Token(NamedTuple):
    """One token."""

    kind: str
    """`number`, `symbol`, `function`, `word`, `command`, `environment`, `join` (and, or) or `mark` (anything else)."""
    text: str
    spaced: bool = False
    """Whether white space stands before it."""


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
_SCRIPTS = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+|[₀-₉]+")
_ROOT = re.compile(r"√\s*(\(|\{|\d+|\w)")
_CURRENCY = "€£¥¢₹"
_CURRENCY_CODE = re.compile(r"(USD|US\$|EUR|GBP|INR|Rs)\.?\s*(?=\\?\$?\s*\d)")
_CODES = {"USD": "$", "US$": "$", "EUR": "€", "GBP": "£", "INR": "₹", "Rs": "₹"}
_UNIT_FUNCTION = re.compile(r"(?:min|sec|deg)(?![A-Za-z])(?!\s*(?:[({_^\\\d]|[A-Za-z](?![A-Za-z])))")
"""Minutes, seconds and degrees behind a number: no functions, since nothing follows that they could be of."""
_COUNTED = re.compile(r"\d{1,2}-[a-z]{3,}(?=\s+[a-z]{3})")

_NUMBER = re.compile(
    r"""[1-9]\d{0,2}(?:(?:\{,\}|,?\\!\s*|\\,|,(?=\d)|\ )\d{3})+(?![\d,]\d|\d)(?:\.\d+)?
    |(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?![\d.]))?""",
    re.VERBOSE | re.ASCII,
)
_IN_BRACKETS = re.compile(
    r"[1-9]\d{0,2}(?:(?:\{,\}|,?\\!\s*|\\,)\d{3})+(?!\d)(?:\.\d+)?|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?![\d.]))?",
    re.ASCII,
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot|overline\s*\\bar)\s*(?:\{\s*(\d+)\s*\}|(\d))", re.ASCII)
_DOTTED = re.compile(r"(\d*)\.(\d*?)(\d{1,3}?)\3{2,}(?:\.\.\.|\s*\\[lc]?dots(?![a-z]))", re.ASCII)
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?|\\(.)", re.DOTALL)
_LETTERS = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*(?:/[a-z]+(?:\^\{?-?\d\}?)?)?|[^\W\d_]+")
_MERIDIEM = re.compile(r"([ap])\.?\s?m\b\.?", re.IGNORECASE)
_UNIT_FRACTION = re.compile(r"(?:[kcm]?m|mi|ft|km|kg|g|mi)/(?:s|h|hr|min|m|cm)\b(?!\s*\()")
_SPACE = re.compile(r"(?:\s|~|\\[,:; >!]|\\q?quad(?![A-Za-z])|\\\s)+")
_TEXT = re.compile(r"\s+|[^\W\d_]+(?:['-][^\W\d_]+)*|\d|\\.|.", re.DOTALL)
_GENITIVE = re.compile(r"'s?(?![A-Za-z'])")
_CHOICE = re.compile(r"\s*[A-J]\.\s*")
_SHORT = word_set("of to in is if at on by as an do")
_LETTER_RUN = re.compile("[A-Za-z]+")


@lru_cache(maxsize=1 << 13)
def tokenize(text: str, brackets: bool = True) -> tuple[Token, ...]:
    """The tokens of `text`.

    Args:
        text: An answer, without the box around it.
        brackets: Whether `3,500` inside brackets is two numbers.

    Raises:
        Unreadable: It has a character or a command that means nothing, or open braces.
    """
    return tuple(_Cutter(plain(text), brackets).cut())


def plain(text: str) -> str:
    """The text in ASCII, but for letters of other scripts."""
    if text.isascii():
        return text
    text = _ROOT.sub(lambda match: r"\sqrt" + (match[1] if match[1] in "({" else f"{{{match[1]}}}"), text)
    text = re.sub(r"\\sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = _SCRIPTS.sub(
        lambda match: (
            ("_" if match[0][0] in "₀₁₂₃₄₅₆₇₈₉" else "^") + "{" + unicodedata.normalize("NFKC", match[0]) + "}"
        ),
        text,
    )
    return "".join(c if c.isascii() else _spelt(c) for c in text)


@cache
def _spelt(character: str) -> str:
    """How LaTeX spells a character: a Greek letter, a fraction, a full-width or any other script's digit."""
    if character in _UNICODE:
        return _UNICODE[character]
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    greek = re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(character, ""))
    if greek:
        return f"\\{greek[2].lower() if greek[1] == 'SMALL' else greek[2].capitalize()} "
    parts = unicodedata.decomposition(character).split()
    simple = "".join(chr(int(part, 16)) for part in parts[1:])
    if parts[:1] == ["<fraction>"]:
        return r"\frac{" + simple.replace("\N{FRACTION SLASH}", "}{") + "}"
    if parts[:1] in (["<wide>"], ["<small>"], ["<font>"]):
        return simple
    return "" if unicodedata.category(character) in ("Cf", "So") else character


class _Cutter:
    def __init__(self, text: str, brackets: bool) -> None:
        self.text, self.place, self.tokens = text, 0, list[Token]()
        self.brackets, self.depth, self.spaced = brackets, 0, False

    def cut(self) -> list[Token]:
        while self.place < len(self.text):
            if match := _SPACE.match(self.text, self.place):
                self.place, self.spaced = match.end(), True
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
        text, place = self.text, self.place
        c = text[place]
        if c in "0123456789." and ((self.spaced and self._counted()) or self._number()):
            return
        if c == "\\":
            self._command()
        elif c.isalpha():
            self._letters()
        elif text.startswith("**", place):
            self.place += 2
            after = text[self.place : self.place + 1]
            if self.after_operand() and after and (after.isalnum() or after in "({-"):
                self.add("mark", "^")
        elif self.tokens and self.tokens[-1].kind == "word" and (match := _GENITIVE.match(text, place)):
            self.place = match.end()
        elif c in _CURRENCY:
            self.place += 1
            self.add("mark", c)
        elif c == "$" or c in '`"':
            self.place += 1
        elif text.startswith("!=", place) and not self.spaced and self._after_number():
            self.place += 1
            self.add("mark", "!")
        elif text.startswith(("<=", ">=", "!=", "=="), place):
            self.place += 2
            self.add("mark", {"<=": "le", ">=": "ge", "!=": "ne", "==": "=="}[text[place : place + 2]])
        elif text.startswith("...", place):
            self.place += 3
            self.add("mark", "ldots")
        elif c in "&+-*/^_=<>|!%'()[]{},;:.":
            self.place += 1
            self._mark(c)
        else:
            raise Unreadable(f"what does {c!r} mean?")

    def _after_number(self) -> bool:
        """Whether `!` can only be a factorial: `6!=720`, not `x!=2`."""
        return bool(self.tokens) and (self.tokens[-1].kind == "number" or self.tokens[-1].text == ")")

    def _counted(self) -> bool:
        """`3-digit` in `12 3-digit numbers` is a word."""
        match = _COUNTED.match(self.text, self.place)
        if not match or not self.tokens or self.tokens[-1].kind not in ("number", "word"):
            return False
        self.place = match.end()
        self.add("word", match[0])
        return True

    def _mark(self, c: str) -> None:
        self.depth += (c in ("(", "[", r"\{")) - (c in (")", "]", r"\}"))
        self.add("mark", c)

    def _number(self) -> bool:
        if match := _REPEATING.match(self.text, self.place):
            self.add("number", f"{match[1] or 0}.{match[2]}({match[3] or match[4]})")
        elif match := _DOTTED.match(self.text, self.place):
            self.add("number", f"{match[1] or 0}.{match[2]}({match[3]})")
        else:
            pattern = _IN_BRACKETS if self.depth > 0 and self.brackets else _NUMBER
            match = pattern.match(self.text, self.place)
            if not match:
                return False
            digits = re.sub(r"\{,\}|,|\\!|\\,|\s", "", match[0])
            if digits.endswith(".") and self.text[match.end() :].strip(" $\\)]}*"):
                match = re.compile(r"\d+").match(self.text, self.place)  # `1...`, or the end of a sentence
                assert match is not None
                digits = match[0]
            self.add("number", digits)
        self.place = match.end()
        return True

    def _command(self) -> None:
        match = _COMMAND.match(self.text, self.place)
        if not match:
            raise Unreadable("a lone backslash")
        self.place = match.end()
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
                self._skip_option()
                self.add("mark", r"\\")
            elif c not in "-/":
                raise Unreadable(f"what does \\{c} mean?")
            return
        name = _ALIASES.get(match[1], match[1])
        if name in ("min", "deg") and self.tokens[-1:] and self.tokens[-1].kind == "number" and self._ends_here():
            self.add("word", name)
        elif name in _DROPPED:
            if name in ("left", "right") and self.text.startswith(".", self.place):
                self.place += 1
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
        """Whether `min`, `sec` or `deg` behind a number is a unit: nothing follows that it could be a function of."""
        is_behind = bool(self.tokens) and self.tokens[-1].kind == "number"
        return is_behind and bool(_UNIT_FUNCTION.match(f"{name} {self.text[self.place :].lstrip()}"))

    def _ends_here(self) -> bool:
        return not self.text[self.place :].strip(" .$")

    def _skip_option(self) -> None:
        option = re.compile(r"\s*\[[^\]]*\]").match(self.text, self.place)
        self.place = option.end() if option else self.place

    def _font(self) -> None:
        """What stands in another font is read as if it did not; a bold letter i is no imaginary unit."""
        content = self._group()
        if content.strip() in ("i", "j", "k", "e", "I"):
            self.add("symbol", "bold " + content.strip())
            return
        self.text, self.place = "{" + content + "}" + self.text[self.place :], 0

    def _group(self) -> str:
        """The text in the braces that come next, or the next character."""
        text, place = self.text, self.place
        while place < len(text) and text[place].isspace():
            place += 1
        if not text.startswith("{", place):
            match = _COMMAND.match(text, place)
            self.place = match.end() if match else place + 1
            return text[place : self.place]
        depth = 0
        for index in range(place, len(text)):
            if text[index] in "{}" and text[index - 1] != "\\":
                depth += 1 if text[index] == "{" else -1
                if depth == 0:
                    self.place = index + 1
                    return text[place + 1 : index]
        raise Unreadable("an open brace")

    def _text(self, name: str) -> None:
        content = self._group()
        bare = content.strip()
        if self._is_unit_function(bare):
            self.add("word", bare)
        elif bare in FUNCTIONS and not (name == "text" and self.after_operand()):
            self.add("function", bare)
        elif name == "mathrm" and (bare in ("e", "i", "d", "E") or re.fullmatch(r"\\[A-Za-z]+", bare)):
            self.text, self.place = f"{bare} {self.text[self.place :]}", 0
        elif "$" in bare.replace(r"\$", "") or any(f"\\{font}" in bare for font in _FONTS | _TEXTS):
            self.text, self.place = content + self.text[self.place :], 0
        else:
            self._words(content)

    def _words(self, content: str) -> None:
        """Text: every run of letters is a word, the rest means what it does in a formula."""
        inner = _Cutter(content, self.brackets)
        inner.spaced = self.spaced
        place = 0
        while place < len(content):
            if match := _MERIDIEM.match(content, place):
                inner.add("word", match[1].casefold() + "m")
                place = match.end()
                continue
            match = _TEXT.match(content, place)
            assert match is not None
            piece = match[0]
            if piece.isspace():
                inner.spaced = True
            elif piece in _CODES and self._before_amount(content[match.end() :]):
                inner.add("mark", _CODES[piece])
                place = match.end()
                while content[place : place + 1] in (".", " "):
                    place += 1
                continue
            elif piece[0].isalpha():
                _add_word(inner, piece)
            elif piece.isdigit() and (self.tokens or inner.tokens) and (counted := _COUNTED.match(content, place)):
                inner.add("word", counted[0])
                place = counted.end()
                continue
            elif piece == "~" or (piece[0] == "\\" and piece[1:] in (",", ":", ";", "!", " ")):
                inner.spaced = True
            elif piece == "?" or content[match.end() :].strip() or piece not in ".!" or _CHOICE.fullmatch(content):
                inner.place = place
                inner.text = content
                inner._next()
                place = inner.place
                continue
            place = match.end()
        self.tokens += inner.tokens
        self.spaced = content[-1:].isspace()

    def _before_amount(self, rest: str) -> bool:
        """Whether a number comes next, in the same text or behind it."""
        rest = rest.lstrip(" .$\\") or self.text[self.place :].lstrip(" $\\")
        return rest[:1].isdigit()

    def _letters(self) -> None:
        text, place = self.text, self.place
        after = self.after_operand()
        if after and (match := _MERIDIEM.match(text, place)):
            self.place = match.end()
            self.add("word", match[1].casefold() + "m")
            return
        if not after and (match := _CURRENCY_CODE.match(text, place)):
            self.place = match.end()
            self.add("mark", _CODES[match[1]])
            return
        if after and self.tokens[-1].kind == "number" and (match := _UNIT_FUNCTION.match(text, place)):
            self.place = match.end()
            self.add("word", match[0])
            return
        if after and (match := _UNIT_FRACTION.match(text, place)):
            self.place = match.end()
            self._words(match[0])
            return
        match = _LETTER_RUN.match(text, place) or _LETTERS.match(text, place)
        assert match is not None
        run = match[0]
        hyphenated = re.compile(r"[A-Za-z]{3,}(?:-[A-Za-z]{3,})+").match(text, place)
        if hyphenated and (after or all(map(is_number_word, hyphenated[0].split("-")))):
            run = hyphenated[0]
        self.place = place + len(run)
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


def _is_word(run: str, behind_number: bool) -> bool:
    """Whether a run of letters is a word and no product."""
    low = run.casefold()
    if low in ("no", "am", "pm", "percent", "pct") or (behind_number and low in _SHORT):
        return True
    if len(run) < 3 or (run.isupper() and not behind_number) or not set(low) & set("aeiouy"):
        return False
    return not all(0 < ord(b) - ord(a) <= 2 for a, b in pairwise(low))  # abc, mnp, xyz
