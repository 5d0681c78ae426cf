"""The ratio of two policies, in logarithms."""

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest size of a log-ratio: a ratio of e^20 has no use, and far beyond it exp overflows."""


def log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """[N] log(π/π_other) from [N] log π and log π_other, clamped to ±MAX_LOG_RATIO."""
    return (logp - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
