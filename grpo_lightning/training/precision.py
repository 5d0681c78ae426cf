"""The precisions of the trainer in which GRPO is correct."""

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from grpo_lightning.types import UsageError

ALLOWED = ("32-true", "bf16-mixed", "64-true", 32, 64, "32", "64", "bf16", None)


def validate_precision(precision: str | int | None) -> None:
    """Raises UsageError for a precision in which GRPO goes wrong."""
    if precision in ALLOWED:
        return
    if precision == "bf16-true":
        reason = (
            "it rounds the rotary frequencies, so that log-probs go wrong with the position. For bfloat16 weights set "
            "model.policy.dtype=bfloat16 and trainer.precision=32-true"
        )
    elif str(precision).startswith(("16", "transformer-engine-float16")):
        reason = "float16 overflows"
    else:
        reason = "it is not tested"
    raise UsageError(
        f"trainer.precision={precision}: {reason}. Use bf16-mixed (float32 weights, bfloat16 arithmetic) or 32-true"
    )


def warn_of_rounded_updates(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warns where weights in bfloat16 lose most updates to rounding."""
    rate = max(group["lr"] for group in optimizer.param_groups)
    trained = [parameter.dtype for parameter in policy.parameters() if parameter.requires_grad]
    if rate > 0 and torch.bfloat16 in trained:
        rank_zero_warn(
            f"model.policy.dtype=bfloat16: a weight keeps 8 bits, so an update of lr={rate:g} is rounded away wherever "
            f"|weight| > {256 * rate:.2g}. For float32 weights with bfloat16 arithmetic set policy.dtype=float32 and "
            "trainer.precision=bf16-mixed"
        )
