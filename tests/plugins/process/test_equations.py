"""The equations in a text, each judged by hand."""

import time

import pytest

from grpo_lightning.plugins.process.equations import truths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7+5=12", [True]),
        ("7+5=13", [False]),
        ("7+5=12 4+8+1=14", [True, False]),
        ("3+4=7=14/2", [True, True]),
        ("12 = 3*4", [True]),
        ("(2+3)*4=20", [True]),
        ("-(47-7)=-40", [True]),
        ("7-47=-(47-7)", [True]),
        ("2*-3=-6", [True]),
        ("5 - -3 = 8 = 10 + -2", [True, True]),
        # What stands around it.
        ("Step 1: 3+4 = 7 apples", [True]),
        ("1) 3+4=7", [True]),
        ("so -3+5=2, and", [True]),
        ("x=3+4=8", [False]),
        ("<think>7+5=12</think>", [True]),
        ("5\n3+4=7\n5", [True]),
        # Spellings.
        ("$5 + $3 = $8.", [True]),
        ("1,000 + 2 = 1,002.", [True]),
        ("3 × 4 = 12, 12 ÷ 4 = 3, 5 − 2 = 3", [True, True, True]),
        (r"3 \times 4 = 12 \div 1", [True]),
        ("3 x 4 = 12", [True]),
        # Decimals: exact, or rounded to the last digit of the result.
        ("0.1+0.2=0.3", [True]),
        ("10/3=3.33", [True]),
        ("10/3=3.34", [False]),
        ("10/3=3", [False]),
        ("1/3*3=1", [True]),
        ("1/8=0.13", [True]),  # 0.125 is as near to 0.12
        ("10/3=3.33+0", [False]),  # not a result
        # No equations of ours.
        ("5=5", []),
        ("7 plus 5 is 12", []),
        ("x + 2 = 5", []),
        ("x -3+5=2", []),
        ("2x=6+0", []),
        ("f(3)+1=4", []),
        ("3+4 = 7y", []),
        ("3 + y = 4", []),
        ("2^3=8+0", []),
        ("50%*2=1", []),
        ("3 1/2 + 1 = 4.5", []),
        ("7/2 = 3 1/2", []),
        (r"\frac{1}{2}+1=1.5", []),
        ("3+4 = 7 million", []),
        ("1/0=1", []),
        ("1+1<=2", []),
        ("3+4==7", []),
        ("3+4=", []),
        ("so -=3+4", []),
        ("3,4+5=9", []),
        ("", []),
    ],
)
def test_equations_are_found_and_decided(text: str, expected: list[bool]):
    assert list(truths(text)) == expected


def test_what_is_too_long_or_too_deep_is_no_equation():
    assert list(truths("9" * 30 + "+0=" + "9" * 30)) == [True]
    assert list(truths("9" * 31 + "+0=" + "9" * 31)) == []
    assert list(truths("(" * 20 + "1+1" + ")" * 20 + "=2")) == [True]
    assert list(truths("(" * 22 + "1+1" + ")" * 22 + "=2")) == []
    assert list(truths("+".join(["1"] * 50) + "=50")) == [True]
    assert list(truths("+".join(["1"] * 51) + "=51")) == []
    assert list(truths("51=" + "+".join(["1"] * 51))) == []


@pytest.mark.parametrize(
    "text",
    [
        "=" * 10**5,
        "1+" * 10**5 + "1=3",
        "(" * 10**5 + "=1",
        "1x1" * 10**5,
    ],
    ids=lambda text: text[:6],
)
def test_hostile_texts_take_no_time(text: str):
    start = time.process_time()
    list(truths(text))
    assert time.process_time() - start < 20
