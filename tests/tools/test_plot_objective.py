from pathlib import Path

import pytest
import torch
from helpers.loading import load_tool
from helpers.paths import ROOT
from PIL import Image

from grpo_lightning.maths.surrogates import Clipped

tool = load_tool("plot_objective")

# Worked examples of the write-up this project follows: π_old, π_θ, ratio, clipped ratio, clipped objective.
EXAMPLES = (
    """
    0.010 0.008 0.800 0.800 0.800
    0.010 0.010 1.000 1.000 1.000
    0.010 0.012 1.200 1.200 1.200
    0.010 0.100 10.000 1.200 1.200
    0.010 0.500 50.000 1.200 1.200
    """,
    """
    0.900 0.800 0.889 0.889 0.889
    0.900 0.900 1.000 1.000 1.000
    0.900 0.950 1.056 1.056 1.056
    0.900 1.000 1.111 1.111 1.111
    """,
    """
    0.900 0.900 1.000 1.000 -1.000
    0.900 0.800 0.889 0.889 -0.889
    0.900 0.720 0.800 0.800 -0.800
    0.900 0.500 0.556 0.800 -0.800
    0.900 0.100 0.111 0.800 -0.800
    """,
)
# π_ref, π_old, π_θ, dJ/dπ_θ of the clip term, of the KL term, in all.
KL_EXAMPLE = """
    0.500 0.500 0.600 +0.020 -0.0056 +0.0144
    0.100 0.500 0.600 +0.020 -0.0278 -0.0078
    1e-50 0.500 0.600 +0.020 -0.0333 -0.0133
"""


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of each table, without its two head lines."""
    parts = [[line for line in part.splitlines() if line.startswith("|")][2:] for part in markdown.split("**Example")]
    return [[line.strip("| ").split(" | ") for line in part] for part in parts[1:]]


def test_the_printed_examples_are_those_of_the_write_up():
    *clipped, kl = tables(tool.examples())
    assert clipped == [cells(example) for example in EXAMPLES]
    assert [[cell.rstrip("⁻") for cell in row] for row in kl] == cells(KL_EXAMPLE)


def test_derivative_of_every_surrogate_at_ratio_one_is_the_advantage():
    one = torch.tensor([0.3])
    for name, surrogate in tool.SURROGATES.items():
        for advantage in (1.0, -1.0):
            assert tool.evaluate(surrogate, one, one, advantage)[1].item() == pytest.approx(advantage), name


def test_value_and_derivative_over_the_ratio_by_hand():
    theta, old = torch.tensor([0.15, 0.3, 0.45]), torch.full((3,), 0.3)
    value, derivative = tool.evaluate(Clipped(), theta, old, 1.0)
    assert value.tolist() == pytest.approx([0.5, 1.0, 1.2]) and derivative.tolist() == pytest.approx([0.5, 1.0, 0.0])
    # Targets: √0.3 = 0.548 for a good token, 0.3² = 0.09 for a bad one.
    target = tool.SURROGATES["TargetProbability"]
    theta, old = torch.tensor([0.08, 0.1, 0.54, 0.56]), torch.full((4,), 0.3)
    assert tool.evaluate(target, theta, old, 1.0)[1].tolist() == [1, 1, 1, 0]
    assert tool.evaluate(target, theta, old, -1.0)[1].tolist() == [0, -1, -1, -1]


def test_k3_surface():
    probability, value = tool.k3_surface(10)
    assert probability.tolist() == pytest.approx([n / 10 for n in range(1, 11)])
    assert value.diagonal().tolist() == [0.0] * 10
    # Row π_ref = 1, column π_θ = 0.1: 10 - log 10 - 1. The reverse: 0.1 + log 10 - 1.
    assert (value[9, 0].item(), value[0, 9].item()) == pytest.approx((6.69741, 1.40259), rel=1e-5)


def test_pictures_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tool.main(["--out", str(tmp_path / "new")])
    for name, size in (("objective", (900, 330)), ("kl_surface", (560, 460)), ("surrogates", (900, 800))):
        with Image.open(tmp_path / "new" / f"{name}.png") as picture:
            assert picture.size == size
    page = (tmp_path / "new" / "objective.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in page
    assert page == (ROOT / "docs" / "objective.md").read_text(encoding="utf-8")
