"""Formulas that have a value at few points or none are compared by sympy."""

import pytest

from grpo_lightning.plugins.verifier import equality
from grpo_lightning.plugins.verifier.comparison import compare


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"\sqrt{x-10^{12}}", r"(x-10^{12})^{1/2}", "equal"),
        (r"\sqrt{x-10^{12}}", r"(x-10^{11})^{1/2}", "different"),
        (r"\ln(x-10^{9})+\ln(x-10^9)", r"2\ln(x-10^9)", "equal"),
        (r"\ln(x-10^{9})+\ln(x-10^9)", r"3\ln(x-10^9)", "different"),
        (r"\sqrt{-(x-y)^2}", r"\sqrt{-(y-x)^2}", "equal"),
        (r"\sqrt{-(x-y)^2}", r"\sqrt{-x^2-2xy-y^2}", "different"),
        (r"\sqrt{-1-x^2-y^2}", r"\sqrt{-(1+x^2+y^2)}", "equal"),
    ],
)
def test_where_there_are_no_points_sympy_decides(
    gold: str, answer: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compare(gold, answer) == verdict
    # Without it an equal formula is not recognised.
    monkeypatch.setattr(equality, "identical", lambda *trees: False)
    assert compare(gold, answer) == "different"
