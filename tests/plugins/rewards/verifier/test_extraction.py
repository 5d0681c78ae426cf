"""Where the answer of a completion is."""

import time

import pytest

from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer

ANSWERS = [
    (r"So $\boxed{7}$.", "7"), (r"\fbox{24}", "24"), (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{\boxed{24}}", "24"), (r"\boxed{3}, no: \boxed{4}", "4"),
    (r"\boxed{3} or \boxed{4}", r"3\text{ or }4"),
    (r"$\boxed{(1,2)}$, $\boxed{(2,1)}$ and $\boxed{5}$", "(1,2); (2,1); 5"),
    (r"\boxed{3} \boxed{4}", "3; 4"), (r"\boxed{3}. \boxed{4}", "4"),
    (r"Either $\boxed{2}$ or else $\boxed{3}$.", r"2\text{ or }3"), (r"$\boxed{2}$ / $\boxed{3}$", "2; 3"),
    (r"$\boxed{8}$, or rather $\boxed{9}$", "9"), (r"$x=\boxed2$ and $x=\boxed3$", "2; 3"),
    (r"\boxed{-\boxed{3}}", "-3"), (r"\boxed{\text{not }\boxed{3}}", r"\text{not }3"),
    (r"\boxed{2, \boxed{3}}", "2, 3"), (r"-\boxed{3}", "- 3"), (r"The answer is not \boxed{3}.", "3"),
    (r"\boxed{3} or maybe 8.", "3"), (r"\boxed{3} and we are done.", "3"),
    (r"Thus Tim has $\boxed{42}$ apples and 3 pears.", "42"),
    ("Either the answer is 3, or the answer is 8", "8"), ("The answer is $7$ or maybe $8$.", "$7$ or maybe $8$"),
    ("The answer is $7$ $8$ $9$.", "$7$ $8$ $9$"), ("The answer is $7$ thousand.", "$7$ thousand"),
    ("The answer is $18 (9 eggs at $2 each).", "$18 (9 eggs at $2 each)"), ("The answer is 7 (mod 10)", "7 (mod 10)"),
    ("<answer>7</answer> or <answer>8</answer>", "8"), ("The answer is 7:30 a.m. sharp", "7:30 a.m. sharp"),
    ("Answer: 42<|im_end|>", "42"), (r"\boxed{3} and so on \boxed{4", "3"), (r"stray { and } and } \boxed{5} }", "5"),
    (r"\boxed{24} \boxed{}", None), (r"\boxed{4", None), ("<answer> 20 </answer>", "20"),
    ("<answer>1</answer> <answer>2</answer>", "2"), ("<answer>1", None), (r"<answer>6</answer> \boxed{7}", "7"),
    ("#### 40\nWait.\n#### 25 apples", "25 apples"), ("####10", "10"),
    ("Final Answer: The final answer is $24$. I hope it is correct.", "24"), ("The answer is: **8**", "8"),
    ("**Answer**: 12", "12"), ("The answer is therefore 12.", "12"), ("The answer is 12, since 3*4 = 12.", "12"),
    ("The answer is 12 or 14.", "12 or 14"), ("The answer is $12$ or $14$.", "$12$ or $14$"),
    ("The answer is **$12$**, as it was.", "12"), ("The answer is not 12.", "not 12"),
    ("The answer is:\n\\[\n\\frac{2}{3}\n\\]\nDone.", "\\frac{2}{3}"), ("The answer is $$x^2$$", "x^2"),
    ("The answer is 8. Let me check: 3 + 5 = 8.", "8"), ("The answer is 3.5.", "3.5"),
    (r"The answer is \(x^2\), as I said", "x^2"), ("Answer:\n42", "42"), ("#### Step 3\nThe answer is 9.", "9"),
    ("There are 42 students and 17 teachers.", None), ("", None), (r"<think>\boxed{6}</think> \boxed{7}", "7"),
    (r"<think>\boxed{6}</think> That was all.", None), (r"<think>\boxed{6}", None),
    (r"<think>a</think> \boxed{6} <think>\boxed{7}", None), (r"\boxed{143} </think> So \boxed{143}.", "143"),
    ("The answer is 42!", "42 !"), ("The answer is **42**! Well done.", "42"), ("The answer is $5!$", "5!"),
    (r"\boxed{5 !}", "5!"), ("The answer is 5 after adding 2 and 3 of them.", "5"),
    ("#### 3 times as many as 4", "3 times as many as 4"),
    (r"The answer is $5\text{ sq. units}$.", r"5\text{ sq. units}"),
    (r"So $x = 3\boxed{18}$.", "3 18"), (r"$\frac62=\boxed{3}\text{ cm}$", r"3 \text{ cm}"),
    (r"$x=\boxed{1}$ and $y=\boxed{2}$ by $\boxed{3}$", "3"), (r"$\boxed{1}$ for (a) and $\boxed{2}$", "1; 2"),
    (r"$\boxed{\frac{25}{13}} = \boxed{1\frac{12}{13}}$", r"1\frac{12}{13}"), (r"$\boxed{3}\cup\boxed{8}$", "3; 8"),
    ("\\begin{align*}\nx&=2+3\\\\\n&=\\boxed{5}.\n\\end{align*}", "5"), (r"\[\boxed{18} &= x \tag{1}\]", "18"),
    (r"$\boxed{8}^\circ$", "8"), (r"$16\equiv\boxed{6}\pmod{10}$", "6"), (r"$a \le \boxed{7}$", "7"),
    (r"$\boxed{18}\%$", r"18 \%"), (r"$\boxed{5}^2$", "5 ^2"), (r"$[17,\boxed{18}]$", "[17, 18 ]"),
    (r"$\boxed{2}\,\mathrm{~cm}^{-1}$", r"2 \text{ cm ^{-1}}"), (r"$\boxed{2}\ {eV}$", r"2 \text{ eV}"),
    (r"$\text{The sum is } \boxed{2}$", "2"), (r"$P: \boxed{2}$", "2"), (r"$3:\boxed{2}$", "3: 2"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


LONG_TEXTS = [
    r"\boxed{" * 100_000, r"\boxed{1}, " * 50_000, r"\boxed" + " " * 500_000, "answer is " * 50_000,
    "answer:" + "*" * 500_000, "answer is" + " " * 500_000, "answer is " + ".****" * 100_000,
    "answer is " + "so " * 200_000, "answer is $x$" + " " * 500_000, "answer is $x$," * 50_000,
    "answer is\n\\[" * 50_000, "answer is " + "\\(" * 200_000, "\\boxed{" + "answer is " * 50_000 + "}",
    r"\boxed{1}" + " a   " * 22 + r" zz \boxed{2}", r"$\boxed{1}" + r" \, a ^ 2 " * 90 + "?$",
    "<answer>" * 100_000, "####" * 100_000, "{" * 500_000 + r"\boxed{" + "}" * 500_000,
]  # fmt: skip


@pytest.mark.parametrize("text", LONG_TEXTS)
def test_time_is_linear_in_the_text(text):
    start = time.process_time()
    extract_answer(text)
    assert time.process_time() - start < 20
