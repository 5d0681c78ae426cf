"""Means over seeds with their intervals, and how many of their digits to show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ENOUGH = 3
"""Seeds from which on an interval is drawn: with two it is 12.7 standard errors wide to each side."""
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval."""

    mean: float
    half: float
    """Half the width of the 95 % interval; NaN where there is none: below two seeds."""
    n: int
    """Seeds that count."""

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval."""
        return abs(self.mean) > self.half


def t_quantile(df: int) -> float:
    """Student's t at 97.5 %; above 30 degrees of freedom by Cornish and Fisher's expansion, off by less than 1e-4."""
    assert df >= 1
    if df <= len(T_975):
        return T_975[df - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval, t * s / √n, of the values that are finite."""
    finite = [value for value in values if math.isfinite(value)]
    n = len(finite)
    if n < 2:
        return Estimate(finite[0] if finite else math.nan, math.nan, n)
    return Estimate(float(np.mean(finite)), t_quantile(n - 1) * float(np.std(finite, ddof=1)) / n**0.5, n)


def with_interval(of: Estimate, sign: str = "") -> str:
    """Mean ± half, with two digits of the half; three significant digits where there is no half, or it is 0."""
    if not math.isfinite(of.half):
        return f"{of.mean:{sign}.3g}"
    if of.half <= 1e-9 * abs(of.mean):
        return f"{of.mean:{sign}.4g} ± 0"
    if of.half < 1e-5:
        return f"{of.mean:{sign}.3g} ± {of.half:.2g}"
    decimals = min(6, max(0, 1 - math.floor(math.log10(of.half))))
    return f"{of.mean:{sign}.{decimals}f} ± {of.half:.{decimals}f}"
