"""Neighbours of what a question asks for: units, families, orders, names, and explanations behind a box."""

import pytest

from grpo_lightning.plugins.verifier.comparison import compare
from grpo_lightning.plugins.verifier.extraction import extract_answer

RIGHT = [
    ("How long?", "7 m", [r"7\ \text{meters}", "7", "7m", r"0.007\text{ km}"]),
    ("How fast?", "40 mph", ["40 miles per hour"]),
    ("How warm?", r"8^\circ C", ["8 degrees Celsius", r"8^\circ\mathrm{C}", r"8^\circ"]),
    ("The work?", "15 J", ["15 joules"]),
    ("What is the speed in km/h?", "72", [r"72\text{ km/h}", "72 kilometers per hour"]),
    ("What is g?", "9.8 m/s^2", ["9.8 meters per second squared", r"9.8\text{ m s}^{-2}"]),
    ("How many miles does he run per day?", "20", ["20 miles per day", "20 miles"]),
    ("The cost?", "$0.60", ["60 cents"]),
    ("Solve.", "{2, 5}", ["5, 2", r"\{5, 2\}", r"x=2 \text{ or } x=5"]),
    ("Solve.", "1, 2, 3", [r"1, 2 \text{ and } 3"]),
    ("Solve.", r"{-\sqrt{11}, \sqrt{11}}", [r"x = \pm\sqrt{11}"]),
    ("Which?", "n \\equiv 1 \\pmod 4", ["n = 4k + 1", "4k - 3"]),
    ("Solve.", r"x = -\frac{\pi}{4} + k\pi, k\in\mathbb{Z}", [r"x = \frac{3\pi}{4} - n\pi, n\in\mathbb{Z}"]),
    ("Solve.", r"x \equiv 3 \pmod 9", [r"x \equiv -6 \pmod 9"]),
    ("Which interval?", "(-3, 3)", ["|x| < 3"]),
    ("Find z.", "z = 9", [r"\therefore z = 9", "9 = z"]),
    ("Sort in increasing order.", "1, 2", ["1 < 2", "1, 2"]),
    ("Transpose it.", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", [r"A^T = \begin{pmatrix}1&2\\3&4\end{pmatrix}"]),
    ("Solve it.", "y = 3e^x", ["y(x) = 3e^x"]),
    ("The eigenvalues?", "1, 3", [r"\lambda_1 = 3, \lambda_2 = 1"]),
    ("Is 57 prime?", "No", [r"\text{No, } 57 = 3 \cdot 19"]),
    ("How many points?", "infinitely many", [r"\infty"]),
]
WRONG = [
    ("How long is it in cm?", "15", [r"15\text{ m}", r"15\text{ cm}^2"]),
    ("What is the speed in km/h?", "72", ["72 m/s"]),
    ("Find the angle in degrees.", "60", ["60 radians"]),
    ("How warm in degrees Celsius?", "20", [r"20^\circ F"]),
    ("What does it cost in cents?", "25", [r"\$25", "25 dollars"]),
    ("How many miles per gallon?", "30", ["30 gallons per mile"]),
    ("How far in m?", "1500 m", [r"1.5\text{ km}"]),
    ("Solve.", r"k\pi, k\in\mathbb{Z}", [r"2k\pi, k\in\mathbb{Z}"]),
    ("Solve.", r"x \equiv 3 \pmod 9", [r"x \equiv 3 \pmod 3", r"x \equiv 4 \pmod 9", "9k + 4"]),
    ("Sort in increasing order.", "1, 2", ["2, 1"]),
    ("Give both in that order.", "1, 2", ["2, 1"]),
    ("If x + y = 7, find y.", "3", ["x = 3"]),
    (r"If $a+b=7$, what is the value of $b$?", "3", ["a = 3"]),
    ("Is 57 prime?", "No", [r"\text{No, yes}", r"\text{No, if } 3 \text{ is not}", r"\text{Yes, } 57 = 3 \cdot 19"]),
    ("Solve $|x|<3$.", "(-3, 3)", ["|x| < 3"]),
]
SAID = [
    (r"It is \boxed{\frac{3}{10}} (or 30%).", True),
    (r"It is \boxed{\frac{3}{10}} (or 40%).", False),
    (r"It is \boxed{\frac{3}{10}}, i.e. $0.3$.", True),
    (r"It is \boxed{\frac{3}{10}}, i.e. $0.4$.", False),
    (r"It is \boxed{\frac{3}{10}} (about 0.3).", True),
    (r"It is \boxed{\frac{3}{10}} (about 0.4).", False),
    (r"It would have been \boxed{\frac{3}{10}} had we erred.", False),
    (r"A common mistake is \boxed{\frac{3}{10}}.", False),
    (r"Say it is \boxed{\frac{3}{10}}. Then we reach a contradiction.", False),
    (r"He wrote \boxed{\frac{3}{10}}, which is incorrect.", False),
    (r"The third part is \boxed{\frac{3}{10}}.", True),
    ("So we pay $1,102.50.\n\n\\boxed{\\frac{3}{10}}", True),
]


@pytest.mark.parametrize(("question", "gold", "answers"), RIGHT)
def test_the_same_in_another_form(question, gold, answers):
    assert [compare(gold, answer, question) for answer in answers] == ["equal"] * len(answers)


@pytest.mark.parametrize(("question", "gold", "answers"), WRONG)
def test_what_the_question_rules_out(question, gold, answers):
    assert [answer for answer in answers if compare(gold, answer, question) == "equal"] == []


@pytest.mark.parametrize(("completion", "right"), SAID)
def test_what_stands_around_a_box(completion, right):
    assert (compare(r"\frac{3}{10}", extract_answer(completion), "The chance?") == "equal") == right
