"""The ratio of two policies, in logarithms."""

from torch import Tensor

MAX_LOG_RATIO = 20.0


def log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """log(π/π_other), clamped to ±20: e^20 is beyond any use, and beyond it exp overflows."""
    return (logp - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
