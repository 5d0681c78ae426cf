import re
from typing import Any
from xml.etree import ElementTree

import pytest

from grpo_lightning.plugins.looking.report.charts import Series, XAxis, chart, outside, ticks, y_range

STEPS = XAxis(1, 3, "exploration steps", is_count=True)


def points(svg: str, kind: str) -> list[list[tuple[float, float]]]:
    """The coordinates of every line of a kind."""
    found = re.findall(rf'class="{kind}" points="([^"]*)"', svg)
    return [[tuple(map(float, point.split(","))) for point in one.split()] for one in found]


def series(*values: tuple[float, float], **more: Any) -> Series:
    return Series("a", 0, [[*values]], **more)


def test_points_by_hand():
    # The plot goes from (56, 210) to (426, 12), so 370 x 198; y from -0.05 to 1.05 of the values' range.
    svg = chart([series((1, 0.0), (2, 1.0), (3, 0.5))], "a title", STEPS)
    (line,) = points(svg, "mean")
    assert [x for x, _ in line] == [56.0, 241.0, 426.0]
    assert [y for _, y in line] == pytest.approx([210 - 198 * 0.05 / 1.1, 12 + 198 * 0.05 / 1.1, 111], abs=0.05)
    assert ElementTree.fromstring(svg).attrib["viewBox"] == "0 0 440 250"


def test_the_y_axis_shows_every_seed_and_most_of_the_bands():
    def one(low: float, high: float) -> list[Series]:
        return [series((1, 1.0), (2, 2.0), band=[[(1, low, high), (2, low, high)]])]

    assert y_range(one(0.9, 2.1)) == pytest.approx((0.9, 2.1))
    # Of a band that is much wider half a range is shown to each side: 1.1 / 2 from 0.95 and 2.05; not below 0.
    assert y_range(one(-9, 9)) == pytest.approx((0.4, 2.6))
    assert y_range([series((1, 0.2), (2, 2.0), band=[[(1, -9, 9), (2, -9, 9)]])])[0] == 0.0
    assert y_range([series((1, 5.0))]) == (2.5, 7.5)
    assert y_range([series((1, 0.0))]) == (-0.5, 0.5)
    assert y_range([series((1, 1.0), (2, 2.0))], lines=[3.0])[1] == pytest.approx(3.1)


def test_an_outlier_does_not_flatten_the_curve_and_is_reported():
    values = [float(i % 5) for i in range(100)]
    values[7] = 1000.0
    outlying = [series(*enumerate(values))]
    assert y_range(outlying) == pytest.approx((-0.2, 5.0))
    assert outside(outlying) == [1000.0]
    # One that is 9 times as far is shown.
    values[7] = 36.0
    distant = [series(*enumerate(values))]
    assert y_range(distant)[1] > 36 and outside(distant) == []


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0.0, 1.0, False, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1, 60, True, [10, 20, 30, 40, 50, 60]),
        (1, 3, True, [1, 2, 3]),  # never 1.5
        (0.5, 1.5, True, [1]),
        (-3e-7, 9e-7, False, [-2e-7, 0, 2e-7, 4e-7, 6e-7, 8e-7]),
        (99.0, 101.0, False, [99.0, 99.5, 100.0, 100.5, 101.0]),
    ],
)
def test_ticks(low: float, high: float, whole: bool, expected: list[float]):
    assert ticks(low, high, 6, whole) == pytest.approx(expected)


def test_a_constant_curve_has_no_other_value_on_its_axis():
    tick_texts = re.findall(
        r'text-anchor="end">([^<]*)<', chart([series((1, 1.0), (2, 1.0 + 1e-15))], "a title", STEPS)
    )
    assert tick_texts == ["1", "exploration steps"]
