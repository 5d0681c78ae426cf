"""Cuts an answer into tokens: numbers, symbols, functions, words, commands. LaTeX and plain text give the same."""

import re
import unicodedata
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

from grpo_lightning.plugins.rewards.verifier.units import CURRENCIES, UNITS
from grpo_lightning.plugins.rewards.verifier.words import spellings, word_set


class Unreadable(ValueError):
    """The text is no answer that the grammar knows."""


class Token(NamedTuple):
    """One token of an answer: its kind and its text."""

    kind: str
    """`number`, `symbol`, `function`, `word`, `command`, `environment`, `join` (and, or) or `mark` (anything else)."""
    text: str
    """The token in its usual spelling."""
    spaced: bool = False
    """Whether white space precedes it."""


FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh ln log lg exp gcd lcm "
    "max min arg det sgn Re Im deg mod inf sup Pr"
)
_DROPPED = word_set(
    "left right displaystyle textstyle limits nolimits checkmark blacksquare qedhere hline bf it rm mathstrut tiny "
    "small normalsize large Large LARGE huge Huge"
)
_BESIDE = word_set("color textcolor phantom vphantom hspace vspace")
_FONTS = word_set("mathbf boldsymbol bm mathit mathsf mathcal mathscr mathfrak underline emph boxed fbox")
_TEXTS = word_set("text textrm textbf textit texttt textsf textnormal mbox hbox mathrm operatorname mathop")
_ALIASES = spellings(
    r"frac dfrac tfrac cfrac; binom dbinom tbinom; le leq leqslant; ge geq geqslant; < lt; > gt; ne neq; emptyset "
    r"varnothing; | lvert rvert vert; \| lVert rVert Vert; \{ lbrace; \} rbrace; ( langle; ) rangle; : colon; "
    r"setminus backslash smallsetminus; * times cdot ast; / div; or lor vee; and land wedge; ldots dots cdots dotsc "
    r"dotsb; circ degree; [ lbrack; ] rbrack; overline bar; hat widehat; vec overrightarrow; approx approxeq simeq; "
    r"to rightarrow; = colonequals; mathbb Bbb; ' prime; \\ cr"
)
_UNICODE = spellings(
    r"- − – ‐ —; \pm ±; \mp ∓; * × · ⋅; / ÷ ⁄ ∕; : ∶; , 、; ' ′ ’; \le ≤; \ge ≥; \ne ≠; \approx ≈; \in ∈; \cup ∪; "
    r"\cap ∩; \emptyset ∅; \infty ∞; ^\circ °; \ldots …; \AA Å; \lor ∨; \land ∧; \mathbb{R} ℝ; \mathbb{Z} ℤ; "
    r"\mathbb{N} ℕ; \mathbb{Q} ℚ; \mathbb{C} ℂ; \equiv ≡; \to →; \Omega Ω; \lfloor ⌊; \rfloor ⌋; \lceil ⌈; \rceil "
    r"⌉; \setminus ∖; ( ⟨; ) ⟩; '' ″"
)
_SCRIPT = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+|[₀-₉]+")
_ROOT = re.compile(r"√\s*(\([^()]*\)|\{[^{}]*\}|\d+|\w)")
_LEXEME = re.compile(
    r"""(?P<space>(?:\s|~|\\[,:;\ >!]|\\q?quad(?![A-Za-z])|\\\s)+)
    |(?P<repeating>([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*(?:\\bar\s*)?(?:\{\s*([0-9]+)\s*\}|([0-9]))
        |([0-9]*)\.([0-9]*?)([0-9]{1,3}?)\9{2,}(?:\.\.\.|\s*\\[lc]?dots(?![a-z])))
    |(?P<number>[1-9][0-9]{0,2}(?:(?:\s?\{,\s?\}|,?\\!\s*|\\,|,(?=[0-9])|\ )[0-9]{3})+(?![0-9,][0-9]|[0-9])(?:\.[0-9]+)?
        |(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9.]))?)
    |(?P<command>\\[A-Za-z]+\*?|\\.)
    |(?P<letters>[A-Za-z]+|[^\W\d_]+)
    |(?P<skipped>[$`"])
    |(?P<mark>\{:\}|\*\*|<=|>=|!=|==|\.\.\.|[&+\-*/^_=<>|!%'()\[\]{},;:.€£¥¢₹])""",
    re.VERBOSE | re.DOTALL,
)
_SPACE = re.compile(r"\s*(?=[A-Za-z])")
_TEXT = re.compile(r"\s*\\(?:text|mathrm)\s*\{[\s~]*(?=[A-Za-z])")
_SEPARATOR = re.compile(r"(?<!\{),(?!\\)| ")
_UNIT_FUNCTION = re.compile(r"(?:min|sec|deg)(?![A-Za-z])(?!\s*(?:[({_^\\\d]|[A-Za-z](?![A-Za-z])))")
"""Minutes, seconds and degrees after a number, if no argument follows that would make them functions."""
_HYPHENATED = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_MERIDIEM = re.compile(r"([ap])\.?\s?m\b\.?", re.IGNORECASE)
_MARKS = spellings("^ **; : {:}; le <=; ge >=; ne !=; ldots ...")
SHORT = word_set("of to in is if at on by as an do am pm we he it so")
"""Words that are no product behind a number."""


@lru_cache(maxsize=1 << 13)
def tokenize(text: str, brackets: bool = True) -> tuple[Token, ...]:
    """Returns the tokens of an answer without its box; if `brackets`, `3,500` inside brackets is two numbers.

    Raises `Unreadable` for an unknown character or command, or open braces.
    """
    return tuple(_Cutter(plain(text), brackets).cut())


def plain(text: str) -> str:
    """Returns the text in ASCII, except for letters of other scripts."""
    if text.isascii():
        return text
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1].strip('(){}')}}}", text)
    text = _SCRIPT.sub(lambda match: f"{'_' if match[0][0] in '₀₁₂₃₄₅₆₇₈₉' else '^'}{{{_normal(match[0])}}}", text)
    return "".join(c if c.isascii() else _spelt(c) for c in text)


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


@cache
def _spelt(character: str) -> str:
    """Returns the LaTeX spelling of a character: a Greek letter, a fraction, a digit of any script."""
    if character in _UNICODE:
        spelling = _UNICODE[character]
        return spelling + " " * spelling[-1].isalpha()
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    name = unicodedata.name(character, "").split()
    if name[:1] == ["GREEK"] and len(name) == 4:
        return f"\\{name[3].lower() if name[1] == 'SMALL' else name[3].capitalize()} "
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind == "<fraction>":
        return r"\frac{" + _normal(character).replace("\N{FRACTION SLASH}", "}{") + "}"
    if kind in ("<wide>", "<small>", "<font>"):
        return _normal(character)
    return "" if unicodedata.category(character) in ("Cf", "So") else character


@cache
def _is_greek(name: str) -> bool:
    case = "SMALL" if name.islower() else "CAPITAL"
    try:
        return bool(unicodedata.lookup(f"GREEK {case} LETTER {name.replace('ambda', 'amda')}"))
    except KeyError:
        return name in ("ell", "hbar")


class _Cutter:
    """Cuts a formula or, if `prose` is true, a text in which all letters are words."""

    def __init__(self, text: str, brackets: bool, prose: bool = False) -> None:
        self.text = text
        self.brackets = brackets
        self.prose = prose
        self.position = 0
        self.depth = 0
        self.spaced = False
        self.tokens: list[Token] = []

    def cut(self) -> list[Token]:
        while self.position < len(self.text):
            match = _LEXEME.match(self.text, self.position)
            if match is None or match.lastgroup is None:
                raise Unreadable(f"what does {self.text[self.position]!r} mean?")
            self.position = match.end()
            getattr(self, f"_{match.lastgroup}")(match)
        return self.tokens

    def add(self, kind: str, text: str) -> None:
        self.tokens.append(Token(kind, text, self.spaced))
        self.spaced = False

    @property
    def last(self) -> Token:
        return self.tokens[-1] if self.tokens else Token("", "")

    def splice(self, text: str) -> None:
        """Reads a text in place of what was read."""
        self.text, self.position = text + self.text[self.position :], 0

    # ----- one method per group of `_LEXEME`

    def _space(self, _match: re.Match[str]) -> None:
        self.spaced = True

    def _skipped(self, match: re.Match[str]) -> None:
        is_money = match[0] == "$" and self.text.count("$") == 1 and not self.tokens
        if is_money and self.text[self.position :][:1].isdigit():
            self.add("mark", "$")

    def _repeating(self, match: re.Match[str]) -> None:
        integer_digits, fixed, *period = (group for group in match.groups()[2:] if group is not None)
        self.add("number", f"{integer_digits or 0}.{fixed}({period[0]})")

    def _number(self, match: re.Match[str]) -> None:
        text = match[0]
        separator = _SEPARATOR.search(text) if self.depth > 0 and self.brackets else None
        text = text[: separator.start()] if separator else text
        self.position = match.start() + len(text)
        digits = "".join(c for c in text if c.isdigit() or c in ".eE+-")
        if digits.endswith(".") and self.text[self.position :].strip(" $\\)]}*"):  # `1...`, or the end of a sentence
            digits, self.position = digits[:-1], self.position - 1
        self.add("number", digits)

    def _mark(self, match: re.Match[str]) -> None:
        text, text_after = match[0], self.text[self.position :]
        if text == "!=" and not self.spaced and (self.last.kind == "number" or self.last.text == ")"):
            self.position -= 1  # a factorial: `6!=720`
            text = "!"
        elif text == "'" and self.last.kind == "word":
            self.position += text_after.startswith("s")
            return
        self.depth += (text in ("(", "[")) - (text in (")", "]"))
        self.add("mark", _MARKS.get(text, text))

    def _command(self, match: re.Match[str]) -> None:
        name = match[0][1:].rstrip("*")
        if not name.isalpha():
            return self._escaped(name or match[0][1:])
        name = _ALIASES.get(name, name).removeprefix("var")
        if name in _DROPPED or name.lower().rstrip("lr") in ("big", "bigg"):
            self.position += name in ("left", "right") and self.text.startswith(".", self.position)
        elif name in _FONTS:
            content = self.group()
            is_vector = content.strip() in ("i", "j", "k", "e", "I")  # a bold i is no imaginary unit
            self.add("symbol", f"bold {content.strip()}") if is_vector else self.splice("{" + content + "}")
        elif name in _TEXTS:
            self._text()
        elif name in _BESIDE:
            self.group()
        elif name in ("begin", "end"):
            self.add("environment", f"{name} {self.group().strip()}")
            if self.last.text == "begin array":
                self.group()
        elif name == "mathbb":
            self.add("command", f"mathbb {self.group().strip()}")
        elif name in FUNCTIONS:
            self.add("function", name)
        elif name == "AA":
            self.add("word", "angstrom")
        elif name == "mu" and (micro := (_SPACE if self.prose else _TEXT).match(self.text, self.position)):
            self.position = micro.end()
            self.splice("u" if self.prose else r"\text{u")  # the prefix of `\mu\text{m}`
        elif name in ("imath", "jmath") or _is_greek(name):
            self.add("symbol", name.removesuffix("math"))
        else:
            self.depth += (name in ("(", "[", r"\{")) - (name in (")", "]", r"\}"))
            self.add("command" if name.isalpha() and name not in ("le", "ge", "ne", "ldots") else "mark", name)

    def _escaped(self, c: str) -> None:
        """Returns a backslash before a character that is no letter."""
        self.depth += (c == "{") - (c == "}")
        text_after = self.text[self.position :].lstrip()
        if c == "\\" and text_after.startswith("[") and "]" in text_after:  # `\\[2pt]`
            self.position = len(self.text) - len(text_after) + text_after.index("]") + 1
        if c in r"{}\|$%*":
            self.add("mark", "\\" + c if c in r"{}\|" else c)
        elif c not in "-/()[]":
            raise Unreadable(f"what does \\{c} mean?")

    def group(self) -> str:
        """Takes the braces that follow, or one character; returns the text inside."""
        text = self.text
        position = len(text) - len(text[self.position :].lstrip())
        if not text.startswith("{", position):
            match = _LEXEME.match(text, position)
            self.position = match.end() if match and match.lastgroup == "command" else position + 1
            return text[position : self.position]
        depth = 0
        for index in range(position, len(text)):
            if text[index] in "{}" and text[index - 1] != "\\":
                depth += 1 if text[index] == "{" else -1
                if depth == 0:
                    self.position = index + 1
                    return text[position + 1 : index]
        raise Unreadable("an open brace")

    def is_unit_function(self, text: str) -> bool:
        """Tells whether `min`, `sec` or `deg` at the start of a text is a unit behind a number."""
        return self.last.kind == "number" and _UNIT_FUNCTION.match(text) is not None

    def _text(self) -> None:
        content = self.group()
        bare = content.strip()
        is_unit = self.is_unit_function(f"{bare} {self.text[self.position :].lstrip()}")
        if bare in FUNCTIONS and not is_unit:
            self.add("function", bare)
        else:
            inner = _Cutter(content, self.brackets, prose=True)
            inner.tokens, inner.spaced = self.tokens, self.spaced
            inner.cut()
            self.spaced = content[-1:].isspace()

    def _word(self, start: int, text: str = "") -> None:
        """Adds the word `text`, or the word at `start` with its hyphens and apostrophes."""
        match = _HYPHENATED.match(self.text, start)
        self.position = start + len(text or match[0] if match else text)
        word = self.text[start : self.position].removesuffix("'s")
        low = word.casefold()
        if low in ("percent", "percentage", "pct"):
            self.add("mark", "%")
        else:
            self.add(*(("join", low) if low in ("and", "or") else ("word", word)))

    def _letters(self, match: re.Match[str]) -> None:
        run = match[0]
        low = run.casefold()
        start = match.start()
        is_closed = self.last.text in (")", "]", "}", r"\}", "|", "!", "%", "circ")
        follows_operand = is_closed or self.last.kind in ("number", "symbol", "word")
        meridiem = _MERIDIEM.match(self.text, start)
        if not run.isalpha():
            raise Unreadable(f"what does {run!r} mean?")
        if meridiem and (follows_operand or self.prose):
            self.position = meridiem.end()
            self.add("word", meridiem[1].casefold() + "m")
        elif self.prose:
            self._word(start)
        elif self.is_unit_function(self.text[start:]):
            self.add("word", run)
        elif run in FUNCTIONS and self.last.kind != "word":
            self.add("function", run)
        elif run in ("sqrt", "pi", "infty", "theta", "frac") and self.last.kind != "word":
            self.add("symbol" if run in ("pi", "theta") else "command", run)
        elif low in ("and", "or") or self.is_word(run, follows_operand):
            hyphenated = _HYPHENATED.match(self.text, start)
            self._word(start, "" if hyphenated and "-" in hyphenated[0] else run)
        else:
            for symbol in [run] if run.isupper() else run:
                self.add("symbol", symbol)

    def is_word(self, run: str, follows_operand: bool) -> bool:
        """Tells whether a run of letters in a formula is a word and no product."""
        low = run.casefold()
        is_phrase = self.last.kind == "word" or run in CURRENCIES
        if not run.isascii() or is_phrase or (follows_operand and len(run) > 1 and (run in UNITS or low in UNITS)):
            return True
        if low in ("no", "am", "pm", "percent", "pct") or (follows_operand and self.spaced and low in SHORT):
            return True
        if len(run) < 3 or run.isupper() or not set(low) & set("aeiouy"):
            return False
        return not all(0 < ord(b) - ord(a) <= 2 for a, b in pairwise(low))  # abc, mnp, xyz
