"""Where the answer of a completion is."""

import time

import pytest

from grpo_lightning.rewards.extraction import extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So $\boxed{7}$.", "7"),
        (r"\fbox{24}", "24"),
        (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{24}}", "24"),
        (r"\boxed{3}, no: \boxed{4}", "4"),
        (r"\boxed{3} or \boxed{4}", "3, 4"),
        (r"$\boxed{(1,2)}$, $\boxed{(2,1)}$ and $\boxed{5}$", "(1,2), (2,1), 5"),
        (r"\boxed{3} \boxed{4}", "4"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"stray { and } and } \boxed{5} }", "5"),
        (r"\boxed{24} \boxed{}", None),
        (r"\boxed{4", None),
        ("<answer> 20 </answer>", "20"),
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer>1", None),
        (r"<answer>6</answer> \boxed{7} #### 8", "7"),
        ("#### 40\nWait.\n#### 25 apples", "25 apples"),
        ("####10", "10"),
        ("Final Answer: The final answer is $24$. I hope it is correct.", "24"),
        ("The answer is: **8**", "8"),
        ("**Answer**: 12", "12"),
        ("The answer is therefore 12.", "12"),
        ("The answer is 12, since 3*4 = 12.", "12"),
        ("The answer is 12 or 14.", "12 or 14"),
        ("The answer is $12$ or $14$.", "$12$ or $14$"),
        ("The answer is **$12$**, as it was.", "12"),
        ("The answer is not 12.", "not 12"),
        ("The answer is:\n\\[\n\\frac{2}{3}\n\\]\nDone.", "\\frac{2}{3}"),
        ("The answer is $$x^2$$", "x^2"),
        (r"\boxed{The answer is 9}", "9"),
        ("<answer>The answer is 9.</answer>", "9"),
        ("The answer is 8. Let me check: 3 + 5 = 8.", "8"),
        ("The answer is 3.5.", "3.5"),
        (r"The answer is \(x^2\), I think", "x^2"),
        ("Answer:\n42", "42"),
        ("#### Step 3\nThe answer is 9.", "9"),
        ("There are 42 students and 17 teachers.", None),
        ("", None),
        (r"<think>\boxed{6}</think> \boxed{7}", "7"),
        (r"<think>\boxed{6}</think> That was all.", None),
        (r"<think>\boxed{6}", None),
        (r"<think>a</think> \boxed{6} <think>\boxed{7}", None),
        (r"\boxed{143} </think> So \boxed{143}.", "143"),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 100_000,
        r"\boxed{1}, " * 50_000,
        r"\boxed" + " " * 500_000,
        "answer is " * 50_000,
        "answer:" + "*" * 500_000,
        "answer is" + " " * 500_000,
        "answer is " + ".****" * 100_000,
        "answer is " + "so " * 200_000,
        "answer is $x$" + " " * 500_000,
        "answer is $x$," * 50_000,
        "answer is\n\\[" * 50_000,
        "answer is " + "\\(" * 200_000,
        "\\boxed{" + "answer is " * 50_000 + "}",
        "<answer>" * 100_000,
        "####" * 100_000,
        "{" * 500_000 + r"\boxed{" + "}" * 500_000,
    ],
)
def test_time_is_linear_in_the_text(text):
    start = time.monotonic()
    extract_answer(text)
    assert time.monotonic() - start < 5
