r"""Makes up gold answers, equal rewritings of them and wrong mutations, with verdicts known without the verifier.

Formulas are trees of this file's own, valued by Python's floats: that is how a rewriting is known to be equal and a
mutation to be wrong. Everything else (lists, intervals, units, hedges, restatements) is right or wrong by construction.
Kinds of which only the numbers would vary (matrices, choices, clocks, bases, curves) are in cases.jsonl alone.
"""

import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo_lightning.plugins.data.arithmetic.arithmetic import in_words

Tree = tuple[Any, ...]


@dataclass(frozen=True)
class Pair:
    """A gold answer and a completion to judge."""

    gold: str
    completion: str
    right: bool
    kind: str
    question: str = ""


def each(text: str) -> list[str]:
    """The answers in a text, with semicolons between them."""
    return text.split(" ; ")


def pairs(seed: int) -> Iterator[Pair]:
    """Endless pairs, always the same for a seed."""
    rng = random.Random(seed)
    while True:
        make = rng.choice(MAKERS)
        gold, rights, wrongs = make(rng)
        kind = make.__name__
        if rng.random() < 0.5 and rights:
            yield Pair(gold, framed(rng, rng.choice(rights)), True, kind)
        elif rng.random() < 0.55 and wrongs:
            yield Pair(gold, framed(rng, rng.choice(wrongs)), False, kind)
        elif rng.random() < 0.25:
            yield natural(rng)
        elif rng.random() < 0.7:
            other = rng.choice(wrongs) if wrongs else "17"
            yield Pair(gold, hedged(rng, rng.choice([gold, *rights]), other), False, f"{kind}, hedged")
        else:
            yield asked(rng)


# ----- what stands around an answer


def framed(rng: random.Random, answer: str) -> str:
    """A completion that gives the answer, in one of the ways in which models do."""
    frames = each(
        r"So we get $\boxed{%s}$. ; \boxed{%s} ; The answer is $%s$. ; **Final Answer:** $\boxed{%s}$ ; "
        "<think>First 3, then 5.</think><answer>%s</answer> ; First $12$ and then $7$.\n\n\\[\\boxed{%s}\\] ; "
        r"Let me check: $\boxed{1729}$ is too large. It is $\boxed{%s}$. ; Thus the final answer is: $%s$ ; "
        r"Hence the answer is \(%s\). ; " + "Some steps.\n#### $%s$"
    )
    return rng.choice(frames) % answer


def hedged(rng: random.Random, answer: str, other: str) -> str:
    """A completion that names the answer and takes it back."""
    hedges = each(
        r"\boxed{%s} or \boxed{%s} ; Either \boxed{%s} or else \boxed{%s}. ; \boxed{%s} or maybe \boxed{%s} ; "
        r"\boxed{%s \text{ or } %s} ; \boxed{%s \text{ or maybe } %s} ; \boxed{%s \lor %s} ; "
        r"The answer is $%s$ or $%s$. ; The answer is $%s$, or possibly $%s$. ; "
        r"The answer is $%s$ if we are lucky, otherwise $%s$. ; \boxed{%s \text{ unless } %s} ; \boxed{%s \ne %s} ; "
        r"$\boxed{%s}$ / $\boxed{%s}$ ; <answer>%s or %s</answer>"
    )
    alone = each(
        r"\boxed{\text{not } %s} ; \boxed{\text{either } %s} ; \boxed{%s \text{ is wrong}} ; "
        r"\boxed{\text{anything but } %s} ; \boxed{\text{at least } %s} ; The answer is not $%s$. ; "
        r"\boxed{%s \text{ maybe}} ; \boxed{%s ?\ 99}"
    )
    if rng.random() < 0.7:
        both = [answer, other]
        rng.shuffle(both)
        return rng.choice(hedges) % tuple(both)
    return rng.choice(alone) % answer


def asked(rng: random.Random) -> Pair:
    """A question with an answer that is worked out, or with one that only rewrites the question."""
    question, gold, rights, wrongs = rng.choice(ASKED)(rng)
    right = bool(rights) and rng.random() < 0.4
    return Pair(gold, framed(rng, rng.choice(rights if right else wrongs)), right, "asked", question)


Asked = tuple[str, str, list[str], list[str]]
"""A question, its gold answer, other right answers and wrong ones, which are equal to the gold answer too."""


def case(text: str) -> Asked:
    """The four parts in a text, with `||` between them."""
    question, gold, rights, wrongs = text.split(" || ")
    return question, gold, each(rights) if rights else [], each(wrongs)


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randrange(2, 13) for _ in range(4)]


def asked_number(rng: random.Random) -> Asked:
    a, b, c, _ = _numbers(rng)
    k = rng.randrange(2, 9)
    return rng.choice(
        [
            case(rf"Compute ${a}\cdot {b}+{c}$. || {a * b + c} || {a * b + c} || {a}\cdot {b}+{c} ; {a * b}+{c}"),
            case(
                rf"Share {a * b} sweets among {b} children. || {a} || {a} ; {a}\text{{ sweets}} || "
                rf"\frac{{{a * b}}}{{{b}}} ; {k * a * b}/{k * b} ; \frac{{{a * b}}}{{{b}}}\text{{ sweets}}"
            ),
            case(rf"Half of {2 * a} sweets are left. || {a} || {a} || {2 * a}/2 ; \frac{{{4 * a}}}{{4}}"),
            case(
                rf"Compute $\binom{{{a + b}}}{{{b}}}$. || {math.comb(a + b, b)} || {math.comb(a + b, b)} || "
                rf"\binom{{{a + b}}}{{{b}}} ; \binom{{{a + b}}}{{{a}}}"
            ),
            case(rf"A square has side {a}. || {a * a} || {a * a} || {a}^2 ; {a}\cdot {a} ; \frac{{{a}^3}}{{{a}}}"),
            case(
                rf"Write ${a}000$ in scientific notation. || {a / 10 if a > 9 else a}\times 10^{4 if a > 9 else 3} || "
                f" || {a}000"
            ),
        ]
    )


def asked_constant(rng: random.Random) -> Asked:
    a, b, c, d = _numbers(rng)
    first, second = rf"\sqrt{{{a * a * 7}}}", rf"\sqrt{{{b * b * 7}}}"
    product = f"({a}+{b}i)({c}-{d}i)"
    value = f"{a * c + b * d}+{b * c - a * d}i".replace("+-", "-")
    both = f"{a + c}+{b + d}i"
    return rng.choice(
        [
            case(
                rf"Simplify ${first}+{second}$. || {a + b}\sqrt7 || {a + b}\sqrt{{7}} ; \sqrt{{7}}\cdot {a + b} ; "
                rf"{a + b}\cdot 7^{{1/2}} || {second}+{first} ; {a}\sqrt7+{b}\sqrt7 ; \sqrt7({a}+{b}) ; "
                f"-(-{first}-{second})"
            ),
            case(
                f"Compute ${product}$. || {value} || {value} || {product} ; ({c}-{d}i)({a}+{b}i) ; "
                f"{a}({c}-{d}i)+{b}i({c}-{d}i)"
            ),
            case(
                f"Compute $({a}+{b}i)+({c}+{d}i)$. || {both} || {both} ; {b + d}i+{a + c} || ({a}+{b}i)+({c}+{d}i) ; "
                rf"{a + c}+{b}i+{d}i ; \frac{{{2 * (a + c)}+{2 * (b + d)}i}}{{2}}"
            ),
            case(
                rf"Two discs have radius {a} and {b}. || {a * a + b * b}\pi || \pi\cdot {a * a + b * b} || "
                rf"{a * a}\pi+{b * b}\pi ; \pi({a * a}+{b * b}) ; {a}^2\pi+{b}^2\pi ; "
                rf"\frac{{{2 * (a * a + b * b)}\pi}}{{2}}"
            ),
            case(rf"Find $\int_{{{a}}}^{{{a * b}}}\frac{{dx}}{{x}}$. || \ln {b} || \ln({b}) || \ln {a * b}-\ln {a}"),
            case(
                rf"Compute $\cos\frac{{2\pi}}{{3}}+{a}$. || {a}-\frac12 || \frac{{{2 * a - 1}}}{{2}} || "
                rf"\cos\frac{{2\pi}}{{3}}+{a}"
            ),
            case(f"Add $({a},{b})$ and $({c},{d})$. || ({a + c},{b + d}) || ({a + c}, {b + d}) || ({a}+{c},{b}+{d})"),
        ]
    )


def asked_polynomial(rng: random.Random) -> Asked:
    a, b, c, d = _numbers(rng)
    flat, made = f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})"
    k = rng.randrange(2, 6)
    times = f"{k}x^2+{k * (a + b)}x+{k * a * b}"
    bracket = rf"{c}({a}r+{b})-{d}({a}r-{b})"
    number, rest = a * (c - d), b * (c + d)
    linear = f"{rest}+{number}r".replace("+-", "-")
    return rng.choice(
        [
            case(
                f"Expand ${made}$. || {flat} || {a * b}+{a + b}x+x^2 || (x+{b})(x+{a}) ; x(x+{a})+{b}(x+{a}) ; "
                rf"\frac{{x+{a}}}{{(x+{b})^{{-1}}}} ; x^2+{a}x+{b}x+{a * b} ; -(-x-{a})(x+{b})"
            ),
            case(
                f"Factor ${flat}$. || {made} || (x+{b})(x+{a}) ; ({a}+x)(x+{b}) ; (-x-{a})(-x-{b}) || "
                rf"{a * b}+x^2+{a + b}x ; -(-x^2-{a + b}x-{a * b}) ; \frac{{{times}}}{{{k}}} ; x(x+{a + b})+{a * b} ; "
                rf"{k}\cdot\frac{{{flat}}}{{{k}}}"
            ),
            case(
                rf"Factor ${times}$ completely. || {k}{made} || {k}(x+{b})(x+{a}) ; (x+{b})\cdot {k}(x+{a}) || "
                f"{k}({flat}) ; ({k}x+{k * a})(x+{b}) ; {k * a * b}+{k}x^2+{k * (a + b)}x"
            ),
            case(
                rf"Simplify $\frac{{x^2-{a * a}}}{{x-{a}}}$. || x+{a} || {a}+x || \frac{{x^2-{a * a}}}{{x-{a}}} ; "
                rf"\frac{{{a * a}-x^2}}{{{a}-x}} ; \frac{{(x-{a})(x+{a})}}{{x-{a}}} ; "
                rf"\frac{{{k}(x^2-{a * a})}}{{{k}(x-{a})}} ; x+{a}+0"
            ),
            case(
                f"Simplify ${bracket}$. || {linear} || {linear} || {bracket} ; {a * c}r+{b * c}-{a * d}r+{b * d} ; "
                f"-({d}({a}r-{b})-{c}({a}r+{b}))"
            )
            if c != d
            else case(f"Expand ${made}$. || {flat} || {flat} || {made}"),
            case(
                rf"A box has sides ${a}x$ and ${b}x$. || {a * b}x^2 || {a * b}\cdot x^2 || {a}x\cdot {b}x ; "
                rf"{a}\cdot {b}x^2"
            ),
        ]
    )


def asked_relation(rng: random.Random) -> Asked:
    a, b, k, _ = _numbers(rng)
    slope = rf"y={b}-{a}x"
    circle = f"x^2+y^2-{2 * a}x+{2 * b}y=3"
    return rng.choice(
        [
            case(
                f"Write ${a}x+y={b}$ in slope-intercept form. || {slope} || y=-{a}x+{b} ; {b}-{a}x ; y=-({a}x-{b}) || "
                f"{a}x+y={b} ; {k * a}x+{k}y={k * b} ; y+{a}x={b} ; {b}-y={a}x ; {a}x+y-{b}=0"
            ),
            case(
                f"Write ${circle}$ in standard form. || (x-{a})^2+(y+{b})^2={3 + a * a + b * b} || "
                f"{3 + a * a + b * b}=(y+{b})^2+(x-{a})^2 || {circle} ; {circle[:-2]}-3=0 ; "
                f"{k}x^2+{k}y^2-{2 * a * k}x+{2 * b * k}y={3 * k}"
            ),
            case(f"Solve $|x-{a}|<{b}$. || ({a - b},{a + b}) || {a - b}<x<{a + b} || |x-{a}|<{b} ; |{a}-x|<{b}"),
        ]
    )


ASKED: list[Callable[[random.Random], Asked]] = [asked_number, asked_constant, asked_polynomial, asked_relation]


NAMES = each("Tom ; Jane ; Ravi ; Mei")
THINGS = each("apples ; marbles ; books ; cookies ; tickets")


def natural(rng: random.Random) -> Pair:
    """An ending in words, as models write it under a question in words, or one that hedges or says something else."""
    make = rng.choice([_story, _money, _spelt])
    gold, question, rights, wrongs = make(rng)
    right = rng.random() < 0.5
    return Pair(gold, rng.choice(rights if right else wrongs), right, f"natural, {make.__name__[1:]}", question)


Endings = tuple[str, str, list[str], list[str]]


def _said(rng: random.Random, answers: list[str]) -> list[str]:
    """Answers in words, in the ways in which models give them."""
    frames = each(
        "#### %s ; Answer: %s ; The answer is %s. ; **Final Answer:** %s ; The final answer is **%s**. ; "
        r"\boxed{\text{%s}}"
    )
    return [rng.choice(frames) % answer.replace("$", r"\$") for answer in answers]


def _story(rng: random.Random) -> Endings:
    n, k, days = rng.randrange(13, 99), rng.randrange(100, 199), rng.randrange(2, 9)
    a, b = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    half = rng.randrange(1, n)
    question = (
        f"{a} and {b} sell {thing} in {days} weeks. How many more {thing} does {a} sell than {b} in {days} weeks?"
    )
    rights = each(
        f"{n} more ; {n} more {thing} than {b} ; {a} sells {n} more ; {a} sells {n} {thing} in {days} weeks ; "
        f"{n} ({half} {thing} and {n - half} {thing}) ; {n}: {half} {thing} and {n - half} {thing} ; "
        f"{a} sells {n - half} + {half} = {n} more {thing} than {b} ; about {n} ; {n}! ; {_words(n)} {thing} ; "
        f"{a} sells {_words(n)} more {thing} ; So {a} sells {half} {thing} + {n - half} {thing} = {n} {thing}"
    )
    wrongs = each(
        f"{k} more ; {a} sells {k} {thing} in {days} weeks ; {a} sells {n} or {k} {thing} ; more than {n} ; "
        f"{a} does not sell {n} {thing} ; {n} more than {k} ; {n} ({half} {thing} and {k} {thing}) ; over {n} ; "
        f"{n}: {k} ; {n} ({k}) ; {a} sells {n} {thing} and {b} {k} ; {n} or about {k} ; almost {n} ; "
        f"{k} + {half} = {n} ; {n - half} + {half} = {n} = {k} ; {n} {_words(k)} {thing} ; half of {n} ; "
        f"{n} more than {_words(k)} ; {a} sells at least {n} {thing} ; {_words(k)} {thing} ; {n} (or {k}) ; "
        f"{a} maybe sells {n} {thing} ; {a} never sells {n} ; {n} more than twice {k} ; {n} times {k}"
    )
    return f"{n}", question, _said(rng, rights), _said(rng, wrongs)


def _money(rng: random.Random) -> Endings:
    n, k = rng.randrange(20, 900), rng.randrange(1000, 2000)
    name = rng.choice(NAMES)
    question = f"How much does {name} earn every day at the farmers' market?"
    rights = each(
        f"${n} total ; ${n} altogether ; ${n} every day ; {name} earns ${n} every day at the farmers' market ; "
        f"USD {n} ; {n}.00 dollars ; ${n}.00 ; ${n} per day ; She earns ${n} a day"
    )
    wrongs = each(
        f"${k} total ; ${n} total or ${k} ; {name} earns ${n} or ${k} every day ; {name} earns less than ${n} ; "
        f"USD {k} ; {n}.01 dollars ; {name} could earn ${n} ; ${n} and ${k} ; {name} earns ${n} twice"
    )
    gold = rng.choice([f"{n}", rf"\${n}"])
    if gold != f"{n}":
        wrongs += each(rf"{n} euros ; {n}\% ; {n} cm ; {n} {rng.choice(THINGS)}")
    return gold, question, _said(rng, rights), _said(rng, wrongs)


def _words(n: int, joint: str = " ") -> str:
    return in_words(n).replace("hundred ", f"hundred{joint}")


def _spelt(rng: random.Random) -> Endings:
    n = rng.choice([rng.randrange(2, 100), rng.randrange(100, 10000)])
    rights = [_words(n), _words(n).capitalize(), f"{_words(n)} apples", _words(n).replace("-", " ")]
    rights += [_words(n, " and ")] * (n < 1000)
    wrongs = each(
        f"{_words(n + 1)} ; {_words(n)} or {_words(n + 1)} ; not {_words(n)} ; {_words(n)} thousand ; "
        f"{_words(n)} {n} ; {_words(n)} {_words(n)} ; {_words(n)}, {_words(n + 1)} ; minus {_words(n)} ; "
        f"{_words(n)} dozen ; dozens"
    )
    return f"{n}", "", _said(rng, rights), _said(rng, wrongs)


# ----- answers by kind: a gold answer, right ones, wrong ones


Answers = tuple[str, list[str], list[str]]


def integers(rng: random.Random) -> Answers:
    n = rng.choice([rng.randrange(2, 50), rng.randrange(100, 10**6)]) * rng.choice([1, 1, 1, -1])
    rights = each(
        rf"{n} ; {n:,} ; {n}.0 ; x={n} ; ({n}) ; \text{{{n}}} ; {n}\text{{ units}} ; f(2)={n} ; "
        rf"\frac{{{2 * n}}}{{2}} ; {n} \approx {n}.0 ; {f'1+{n - 1}={n}' if n > 1 else n} ; n = {n}."
    )
    wrongs = each(
        rf"{n + 1} ; {-n} ; {n}0 ; {n}x ; {n},{n + 2} ; ({n},{n}) ; {n}^2 ; {n}+1-1 ; \pm {n} ; "
        rf"{n}\text{{ thousand}} ; {n}=({n + 1}) ; {n}\cdot 1 ; x>{n} ; [{n},{n + 1}] ; {n}_8 ; {n}:{n + 1} ; "
        rf"{n}\text{{ times two}} ; {n}\text{{ tenths}} ; {n} {abs(n) + 1} ; x={n + 1}={n} ; {n}\sqrt{{2}}"
    )
    return f"{n}", rights, wrongs


def fractions(rng: random.Random) -> Answers:
    value = Fraction(rng.randrange(-60, 60) * 7 + 1, rng.randrange(2, 30) * 7 + 2)
    if 100 % value.denominator == 0:
        value += Fraction(1, 3)
    a, b = value.numerator, value.denominator
    rights = each(
        rf"\frac{{{a}}}{{{b}}} ; {a}/{b} ; \dfrac{{{2 * a}}}{{{2 * b}}} ; P = \frac{{{a}}}{{{b}}} ; "
        rf"-\frac{{{-a}}}{{{b}}} ; \frac{{{a}}}{{{b}}}\approx {float(value):.3f} ; \left(\frac{{{a}}}{{{b}}}\right)"
    )
    wrongs = each(
        rf"\frac{{{b}}}{{{a}}} ; \frac{{{-a}}}{{{b}}} ; \frac{{{a + 1}}}{{{b}}} ; \frac{{{a}}}{{{b}}}x ; "
        rf"{float(value):.2f} ; \frac{{{a}}}{{{b}}}^2 ; ({a},{b}) ; {a},{b} ; 1-\frac{{{b - a}}}{{{b}}}"
    )
    return rights[0], rights, wrongs


def decimals(rng: random.Random) -> Answers:
    n = rng.randrange(1001, 99999, 2)
    text = f"{n / 1000}"
    rights = each(rf"{n / 1000:.5f} ; \frac{{{n}}}{{1000}} ; {text} \text{{ cm}} ; x = {text} ; \${text}")
    wrongs = each(f"{n / 100} ; {(n + 1) / 1000} ; -{text} ; {text}1 ; {n // 1000},{n % 1000} ; {n / 1000:.1f}")
    return text, rights, wrongs


def units(rng: random.Random) -> Answers:
    n = rng.randrange(2, 500)
    table = [
        r"\text{ m} || meters ; metres ; m || cm ; s ; kg ; feet",
        r"\text{ cm}^2 || square centimeters ; sq cm || cm ; square meters ; m",
        r"\text{ hours} || h ; hrs ; hour || minutes ; days ; s",
        r"\text{ dollars} || dollars ; USD || cents ; euros ; \%",
        r"\text{ m/s} || meters per second ; m/s || m ; km/h ; m/s^2",
        r"\text{ kg} || kilograms ; kg || g ; mg ; pounds",
    ]
    gold, *lists_of_units = rng.choice(table).split(" || ")
    same, others = map(each, lists_of_units)
    rights = [f"{n}", f"{n}{gold}", *(rf"{n}\text{{ {unit}}}" for unit in same), rf"{n}\,\mathrm{{{same[-1]}}}"]
    wrongs = [*(rf"{n}\text{{ {unit}}}" for unit in others), f"{n + 1}{gold}", rf"{n}{gold}\text{{ or }}{n + 1}{gold}"]
    wrongs += [rf"{n}{gold}\text{{ and }}30\text{{ minutes}}"]
    return f"{n}{gold}", rights, wrongs


def radicals(rng: random.Random) -> Answers:
    a, c, p = rng.randrange(2, 20), rng.choice([2, 3, 5, 6, 7, 10, 11, 13]), rng.randrange(1, 30)
    bare = c if c < 10 else f"{{{c}}}"
    rights = each(
        rf"{p}+{a}\sqrt{{{c}}} ; \sqrt{{{a * a * c}}}+{p} ; {a}\sqrt{bare}+{p} ; x={p}+{a}\cdot\sqrt{{{c}}} ; "
        rf"\frac{{{2 * p}+{2 * a}\sqrt{{{c}}}}}{{2}} ; {p}+{a}\cdot {c}^{{1/2}}"
    )
    wrongs = each(
        rf"{p}-{a}\sqrt{{{c}}} ; {p}\pm {a}\sqrt{{{c}}} ; {p + a}\sqrt{{{c}}} ; {p}+{a}\sqrt{{{c + 1}}} ; "
        rf"{a}\sqrt{{{c}}} ; {p + a * c**0.5:.4f} ; {p}+{a}\sqrt[3]{{{c}}} ; {p - 1}+1+{a}\sqrt{{{c}}} ; "
        rf"{p}+\sqrt{{{a * a * c}}}i"
    )
    if a > 2:
        wrongs += [rf"{p}+\sqrt{{{c}}}+{a - 1}\sqrt{{{c}}}"]
    return rights[0], rights, wrongs


def with_pi(rng: random.Random) -> Answers:
    a, b = rng.randrange(1, 30), rng.choice([1, 2, 3, 4, 5, 6, 7])
    fraction = Fraction(a, b)
    a, b = fraction.numerator, fraction.denominator
    rights = each(
        rf"\frac{{{a}\pi}}{{{b}}} ; \frac{{{a}}}{{{b}}}\pi ; {a}\pi/{b} ; A=\frac{{{2 * a}\pi}}{{{2 * b}}} ; "
        rf"\pi\cdot\frac{{{a}}}{{{b}}}"
    )
    wrongs = each(
        rf"\frac{{{a}}}{{{b}}} ; \frac{{{a}}}{{{b}\pi}} ; \frac{{{a + 1}\pi}}{{{b}}} ; -\frac{{{a}\pi}}{{{b}}} ; "
        rf"{3.1416 * a / b:.4f} ; \frac{{{a}\pi^2}}{{{b}}} ; \frac{{{a}\pi}}{{{b}}}+2\pi k ; "
        rf"{180 * a / b + 1:.0f}^\circ"
    )
    return rights[0], rights, wrongs


def complexes(rng: random.Random) -> Answers:
    a, b = rng.randrange(1, 20), rng.randrange(2, 20)
    gold = f"{a}+{b}i"
    rights = each(rf"{gold} ; {b}i+{a} ; z = {a} + {b} i ; {a}+{b}\mathrm{{i}} ; \frac{{{2 * a}+{2 * b}i}}{{2}}")
    wrongs = each(
        rf"{a}-{b}i ; -{a}+{b}i ; ({a},{b}) ; {a + b} ; {a}+{b}j ; {a}+{b} ; {a}\pm {b}i ; \overline{{{gold}}}"
    )
    return gold, rights, [wrong for wrong in wrongs if a != b or wrong != f"{b}+{a}i"]


def intervals(rng: random.Random) -> Answers:
    a = rng.randrange(-20, 20)
    b = a + rng.randrange(1, 20)
    left, right = rng.choice("(["), rng.choice(")]")
    if left + right == "()" or left + right == "[]":
        right = ")" if left == "[" else "]"
    low, high = ("<" if left == "(" else r"\le"), ("<" if right == ")" else r"\le")
    back_low, back_high = ("<" if left == "(" else r"\le"), (">" if right == ")" else r"\ge")
    rights = each(
        rf"{left}{a},{b}{right} ; {a} {low} x {high} {b} ; x\in {left}{a}, {b}{right} ; "
        rf"{b} {back_high} x \text{{ and }} {a} {back_low} x ; \{{x \mid {a} {low} x {high} {b}\}} ; "
        rf"\left{left}{a},{b}\right{right} ; {left}{a},\frac{{{2 * b}}}{{2}}{right}"
    )
    wrongs = each(
        rf"({a},{b}) ; [{a},{b}] ; {left}{a},{b + 1}{right} ; {a} {low} x ; {left}{b},{a}{right} ; \{{{a},{b}\}} ; "
        rf"{left}{a},{b}{right}\cup[{b + 1},{b + 2}] ; {a},{b} ; |x|<{b} ; x {high} {b}"
    )
    return rights[0], rights, wrongs


def unions(rng: random.Random) -> Answers:
    a = rng.randrange(-20, 5)
    b = a + rng.randrange(1, 9)
    gold = rf"(-\infty,{a})\cup({b},\infty)"
    rights = each(
        rf"x<{a}\text{{ or }}x>{b} ; ({b},\infty)\cup(-\infty,{a}) ; \mathbb{{R}}\setminus[{a},{b}] ; x\in {gold}"
    )
    rights += [gold, rf"x>{b} \lor x<{a}"]
    wrongs = each(
        rf"(-\infty,{a}]\cup({b},\infty) ; ({a},{b}) ; x<{a} ; x<{a}\text{{ and }}x>{b} ; (-\infty,{b})\cup({a},\infty)"
    )
    return gold, rights, wrongs


def tuples(rng: random.Random) -> Answers:
    values = rng.sample(range(-30, 900), rng.choice([2, 3]))
    names = "xyz"[: len(values)]
    inside = ",".join(map(str, values))
    assigned = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
    rights = each(
        rf"({inside}) ; ({', '.join(map(str, values))}) ; \left({inside}\right) ; ({','.join(names)})=({inside})"
    )
    rights += [", ".join(assigned), r" \text{ and } ".join(assigned[::-1])]
    swapped = [values[1], values[0], *values[2:]]
    wrongs = each(
        rf"({','.join(map(str, swapped))}) ; [{inside}] ; \{{{inside}\}} ; ({inside},0) ; "
        rf"({values[0] + 1},{inside.partition(',')[2]})"
    )
    wrongs += [
        r" \text{ or } ".join(assigned),
        ", ".join(f"{n}={v}" for n, v in zip(names, swapped, strict=True)),
        f"{values[0]}",
    ]
    return f"({inside})", rights, wrongs


def lists(rng: random.Random) -> Answers:
    values = sorted(rng.sample(range(-30, 99), rng.choice([2, 3, 4])))
    if rng.random() < 0.3:
        values.append(values[0])
    text = ", ".join(map(str, values))
    mixed = rng.sample(values, len(values))
    rights = [text, ", ".join(map(str, mixed)), rf"{', '.join(map(str, mixed[:-1]))} \text{{ and }} {mixed[-1]}"]
    rights += [f"x = {text}", r" \text{ or } ".join(f"x={value}" for value in mixed)]
    wrongs = [
        ", ".join(map(str, values[:-1])),
        f"{text}, 100",
        f"{text}, {values[1]}",
        f"({text})",
        f"{sum(values)}",
        text.replace(", ", ""),
    ]
    wrongs += [", ".join(map(str, [values[0] + 1, *values[1:]])), ", ".join(map(str, [*values[:-1], values[-1] + 1]))]
    return text, rights, [wrong for wrong in wrongs if wrong != text]


def sets(rng: random.Random) -> Answers:
    values = rng.sample(range(-30, 99), rng.choice([2, 3, 4]))
    mixed = rng.sample(values, len(values))
    gold = rf"\{{{','.join(map(str, values))}\}}"
    members = ", ".join(map(str, mixed))
    rights = each(rf"\{{{members}\}} ; {members} ; x\in\{{{members}\}} ; S = {gold}")
    wrongs = each(
        rf"\{{{','.join(map(str, values[1:]))}\}} ; \{{{','.join(map(str, values))},100\}} ; "
        rf"({','.join(map(str, values))}) ; [{values[0]},{values[1]}] ; \{{{gold}\}} ; {gold}\cup\{{100\}} ; \emptyset"
    )
    return gold, rights, wrongs


# ----- formulas


VARIABLES = ["x", "y", "a", "n", "t"]


def formulas(rng: random.Random) -> Answers:
    """Trees with variables, rewritten and mutated; what they are is decided by their values."""
    tree = _formula(rng, 3, rng.sample(VARIABLES, rng.choice([1, 1, 2])))
    points = _points(_variables(tree))
    values = [_value(tree, point) for point in points]
    if not _variables(tree) or sum(value == value for value in values) < 20 or _is_flat(values):
        return formulas(rng)
    rights, wrongs = [render(tree)], []
    for _ in range(6):
        equal = _rewritten(rng, tree)
        if _agree(values, [_value(equal, point) for point in points]):
            rights.append(render(equal, rng))
        mutant = _mutated(rng, tree)
        others = [_value(mutant, point) for point in points]
        if _differ(values, others) and _variables(mutant) <= _variables(tree):
            wrongs.append(render(mutant, rng))
    name = rng.choice(["f(x)", "y", "S"])
    if name != "y" or "y" not in _variables(tree):
        rights.append(f"{name} = {render(tree, rng)}")
    wrongs += [f"{render(tree)}+1", f"-({render(tree)})", f"{render(tree)}=0"]
    wrongs += [f"{render(tree)}, {render(('add', tree, ('num', 1)))}"]
    return render(tree), rights, wrongs


def _formula(rng: random.Random, depth: int, names: list[str]) -> Tree:
    if depth == 0 or rng.random() < 0.15:
        return ("var", rng.choice(names)) if rng.random() < 0.7 else ("num", rng.randrange(2, 10))
    kind = rng.choice(["add", "add", "sub", "mul", "mul", "div", "pow", "abs", "sqrt", "fn"])
    if kind == "pow":
        return ("pow", _formula(rng, depth - 1, names), ("num", rng.randrange(2, 4)))
    if kind in ("abs", "sqrt"):
        return (kind, _formula(rng, depth - 1, names))
    if kind == "fn":
        return ("fn", rng.choice(["sin", "cos", "ln", "exp"]), _formula(rng, depth - 1, names))
    return (kind, _formula(rng, depth - 1, names), _formula(rng, depth - 1, names))


def render(tree: Tree, rng: random.Random | None = None) -> str:
    """LaTeX, spelt at random if there is `rng`."""
    kind = tree[0]
    parts = [render(child, rng) for child in tree[1:] if isinstance(child, tuple)]
    pick: Callable[..., str] = rng.choice if rng else lambda options: options[0]  # type: ignore[assignment]
    if kind in ("num", "var"):
        return str(tree[1]) if kind == "var" or tree[1] >= 0 else f"({tree[1]})"
    if kind in ("add", "sub"):
        sign = "+" if kind == "add" else "-"
        right = parts[1] if kind == "add" or tree[2][0] not in ("add", "sub", "neg") else f"({parts[1]})"
        return pick(["%s%s%s", "%s %s %s"]) % (parts[0], sign, right if not right.startswith("-") else f"({right})")
    if kind == "neg":
        return f"-({parts[0]})"
    if kind == "mul":
        left, right = (
            child if t[0] in ("num", "var", "abs", "sqrt") else rf"\left({child}\right)"
            for t, child in zip(tree[1:], parts, strict=True)
        )
        return pick([rf"{left}\cdot {right}", rf"{left} \times {right}"])
    if kind == "div":
        return pick([r"\frac{%s}{%s}", r"\dfrac{%s}{%s}"]) % tuple(parts)
    if kind == "pow":
        return rf"\left({parts[0]}\right)^{{{parts[1]}}}" if tree[1][0] != "var" else f"{parts[0]}^{{{parts[1]}}}"
    if kind == "abs":
        return pick([r"\left|%s\right|", r"\lvert %s\rvert"]) % parts[0]
    if kind == "sqrt":
        return pick([r"\sqrt{%s}", r"\left(%s\right)^{1/2}"]) % parts[0]
    return rf"e^{{{parts[0]}}}" if tree[1] == "exp" else rf"\{tree[1]}\left({parts[0]}\right)"


def _rewritten(rng: random.Random, tree: Tree) -> Tree:
    """An equal tree, or one that is checked to be."""
    if tree[0] in ("num", "var"):
        return tree
    parts = [_rewritten(rng, child) if isinstance(child, tuple) else child for child in tree[1:]]
    new: Tree = (tree[0], *parts)
    roll = rng.random()
    if tree[0] in ("add", "mul") and roll < 0.5:
        return (tree[0], new[2], new[1])
    if tree[0] == "sub" and roll < 0.4:
        return ("neg", ("sub", new[2], new[1]))
    if tree[0] == "pow" and new[2] == ("num", 2) and roll < 0.5:
        return ("mul", new[1], new[1])
    if tree[0] == "mul" and new[2][0] in ("add", "sub") and roll < 0.8:
        return (new[2][0], ("mul", new[1], new[2][1]), ("mul", new[1], new[2][2]))
    if tree[0] == "abs" and new[1][0] == "sub" and roll < 0.6:
        return ("abs", ("sub", new[1][2], new[1][1]))
    if tree[0] == "div" and new[1][0] in ("add", "sub") and roll < 0.6:
        return (new[1][0], ("div", new[1][1], new[2]), ("div", new[1][2], new[2]))
    return new


def _mutated(rng: random.Random, tree: Tree) -> Tree:
    """The tree with one thing changed."""
    places = list(_places(tree))
    place = rng.choice(places)
    return _replaced(tree, place, lambda old: _changed(rng, old))


def _changed(rng: random.Random, tree: Tree) -> Tree:
    kind = tree[0]
    if kind == "num":
        return ("num", tree[1] + rng.choice([1, -1, 2]))
    if kind == "var":
        return rng.choice(
            [("abs", tree), ("neg", tree), ("mul", ("num", 2), tree), ("sqrt", ("pow", tree, ("num", 2)))]
        )
    if kind in ("abs", "sqrt"):
        return rng.choice([tree[1], ("neg", tree), ("abs", ("neg", tree[1])) if kind == "sqrt" else ("neg", tree[1])])
    if kind == "fn":
        return ("fn", {"sin": "cos", "cos": "sin", "ln": "exp", "exp": "ln"}[tree[1]], tree[2])
    if kind in ("add", "sub"):
        return ("sub" if kind == "add" else "add", tree[1], tree[2])
    if kind == "mul":
        return rng.choice([("add", tree[1], tree[2]), ("mul", tree[1], ("abs", tree[2]))])
    if kind == "div":
        return ("div", tree[2], tree[1])
    return rng.choice([("abs", tree), ("neg", tree), tree[1]])


def _places(tree: Tree, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    yield path
    for index, child in enumerate(tree):
        if isinstance(child, tuple):
            yield from _places(child, (*path, index))


def _replaced(tree: Tree, path: tuple[int, ...], change: Callable[[Tree], Tree]) -> Tree:
    if not path:
        return change(tree)
    return tuple(_replaced(child, path[1:], change) if index == path[0] else child for index, child in enumerate(tree))


def _variables(tree: Tree) -> set[str]:
    if tree[0] == "var":
        return {tree[1]}
    return set().union(*(_variables(child) for child in tree if isinstance(child, tuple)), set())


def _points(names: set[str]) -> list[dict[str, float]]:
    rng = random.Random("points" + "".join(sorted(names)))
    sizes = (0.3, 1.1, 2.7, 6.5, 19.0)
    return [
        {name: rng.choice(sizes) * rng.uniform(0.6, 1.5) * rng.choice((-1, 1)) for name in sorted(names)}
        for _ in range(60)
    ]


def _value(tree: Tree, point: dict[str, float]) -> float:
    """The real value, NaN where there is none."""
    try:
        value = _evaluated(tree, point)
    except (ValueError, ZeroDivisionError, OverflowError):
        return math.nan
    return value if abs(value) < 1e12 else math.nan


def _evaluated(tree: Tree, point: dict[str, float]) -> float:
    kind, *children = tree[1:] if tree[0] == "fn" else tree
    if kind == "num":
        return float(children[0])
    return point[children[0]] if kind == "var" else OPERATIONS[kind](*(_evaluated(child, point) for child in children))


OPERATIONS: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "neg": operator.neg,
    "pow": lambda base, exponent: base ** int(exponent), "abs": abs, "sqrt": math.sqrt,
    "ln": math.log, "exp": math.exp, "sin": math.sin, "cos": math.cos,
}  # fmt: skip


def _agree(ours: list[float], theirs: list[float]) -> bool:
    """Where one has a value, both have, and the same."""
    pairs = zip(ours, theirs, strict=True)
    return all(abs(a - b) <= 1e-6 * max(abs(a), abs(b)) + 1e-9 or (a != a and b != b) for a, b in pairs)


def _differ(ours: list[float], theirs: list[float]) -> bool:
    """Clearly: both have a value, and another one, at several points."""
    return sum(abs(a - b) > 1e-3 * max(abs(a), abs(b)) for a, b in zip(ours, theirs, strict=True)) >= 3


def _is_flat(values: list[float]) -> bool:
    reals = [value for value in values if value == value]
    return max(reals) - min(reals) < 1e-6 * max(map(abs, reals)) + 1e-9


MAKERS: list[Callable[[random.Random], Answers]] = [
    integers, fractions, decimals, units, radicals, with_pi, complexes, intervals, unions, tuples, lists, sets,
    formulas, formulas, formulas,
]  # fmt: skip
