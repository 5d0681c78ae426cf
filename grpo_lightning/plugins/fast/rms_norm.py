"""Root mean square norms that keep only their input and one factor per token for the backward pass.

With x the input, w the weight, d their width and f = 1 / sqrt(mean(x²) + ε), the output is y = w f x. With g the
gradient of y, that of the weight is sum f g x over tokens, and

    dx = f w g - x f³ / d * sum_j g_j x_j w_j

torch's own `rms_norm` is one kernel on a GPU, and on a CPU several, which keep four tensors.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


def normed(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """y [..., d] and f [..., 1], from [..., d] x and [d] w."""
    exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    factor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    factor = factor.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
    output = (exact * factor).to(hidden.dtype)
    return output.mul_(weight) if weight.dtype == hidden.dtype else weight * output, factor


class _RMSNorm(torch.autograd.Function):
    """See the file's docstring."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """[..., d], [d] -> [..., d]; rounded to the type of `hidden` before it is multiplied by the weight."""
        output, factor = normed(hidden, weight, epsilon)
        ctx.save_for_backward(hidden, weight, factor)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of input and weight."""
        hidden, weight, factor = ctx.saved_tensors
        width = len(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            exact = factor.dtype
            rows, of_rows = hidden.to(exact).reshape(-1, width), gradient.to(exact).reshape(-1, width)
            scale, factors = weight.to(exact), factor.view(-1, 1)
            both = of_rows * rows
            for_weight = torch.mv(both.t(), factors[:, 0]) if ctx.needs_input_grad[1] else None
            slope = torch.mv(both, scale)[:, None] * factors**3 / -width
            for_rows = torch.mul(of_rows, scale, out=both).mul_(factors).addcmul_(rows, slope)
        return (
            for_rows.view(hidden.shape).to(hidden.dtype),
            None if for_weight is None else for_weight.to(weight.dtype),
            None,
        )


class FusedRMSNorm(nn.Module):
    """The first base of a class made from a model's own norm, which computes what this one does not take."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        weight = self.weight
        if isinstance(weight, DTensor) or hidden_states.numel() == 0:
            return super().forward(hidden_states)
        if hidden_states.is_cuda and hidden_states.dtype == weight.dtype == torch.float32:
            return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        if not torch.is_grad_enabled():  # Decoding: a function of autograd costs as much as a kernel of few rows.
            return normed(hidden_states, weight, self.variance_epsilon)[0]
        return _RMSNorm.apply(hidden_states, weight, self.variance_epsilon)
