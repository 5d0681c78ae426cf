"""Log-probs and entropies of drawn tokens in one pass over the vocabulary, with a backward pass of its own.

The head is applied to one block of the vocabulary after the other. Each block is summed while it is in the cache: its
largest logit m, s = sum exp(l - m) and u = sum (l - m) exp(l - m). With all blocks rescaled to one m,

    log p_i = l_i - m - log s        H = log s - u / s

The backward pass makes p again from the logits, which are kept up to a limit and computed again beyond it. With g the
gradient of log p_i and e that of H,

    dl_j = g (1[j = i] - p_j) - e p_j (log p_j + H)

The weight's gradient is written once per block, and that of the states is summed over blocks in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from grpo_lightning.plugins.fast import products
from grpo_lightning.plugins.fast.products import OneDNNLinear, product

KEPT_ELEMENTS = 2**27
"""Logits kept for the backward pass: 512 MiB of float32."""

MAX_ROWS = 4096
"""Tokens worked on at once, so that a block is never narrow."""


def logits_at_once(device: str) -> int:
    """Elements of a block: on a CPU 8 MiB of float32, which its cache holds; a GPU needs more work per launch."""
    return 2**21 if device == "cpu" else 2**24


@dataclass(frozen=True, slots=True)
class Head:
    """A linear head and how its logits are scaled."""

    scale: float
    """Factor of the logits."""
    dtype: torch.dtype
    """Type of the products; everything else is float32, or float64 where this is."""
    num_top: int
    """How many of the likeliest tokens to return."""
    keeps: bool
    """Whether there will be a backward pass."""
    entropy_gradient: bool
    """Whether the entropy has a gradient."""
    block: int
    """Elements of a block."""
    onednn: bool = False
    """Whether oneDNN multiplies."""
    compiled: bool = False
    """Whether what is done with a block's logits is one kernel each, made by `torch.compile`."""

    @property
    def exact(self) -> torch.dtype:
        """Type of logits, sums and results."""
        return torch.promote_types(self.dtype, torch.float32)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, hidden], [W, hidden] -> [N, W] scaled logits, a tensor of their own."""
        bias = None if bias is None else bias.to(self.dtype)
        multiply = product if self.onednn else F.linear
        logits = multiply(hidden, weight.to(self.dtype), bias).to(self.exact)
        return logits if self.scale == 1 else logits.mul_(self.scale)

    def put_product(self, into: Tensor, left: Tensor, right: Tensor) -> None:
        """Writes left times right to `into`, which may be of a wider type."""
        if self._in_place(into, left):
            torch.mm(left, right, out=into)
        else:
            into.copy_(self._product(left, right))

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Adds left times right to `total`, which may be of a wider type."""
        if self._in_place(total, left):
            total.addmm_(left, right)
        else:
            total.add_(self._product(left, right))

    def _in_place(self, into: Tensor, left: Tensor) -> bool:
        """Whether torch's product writes to where it belongs."""
        return not self.onednn and into.dtype == left.dtype

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        return product(left, right.t()) if self.onednn else left @ right


def sums_of(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R, W] -> [R] each: the largest logit m, sum exp(l - m) and sum (l - m) exp(l - m)."""
    # A block may be -inf throughout.
    largest = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    shifted = logits - largest[:, None]
    weights = shifted.exp()
    return largest, weights.sum(-1), shifted.mul_(weights).sum(-1)


def weights_of(logits: Tensor, lse: Tensor) -> Tensor:
    """[R, W], [R] -> [R, W] p: the gradient by the logits but for the drawn tokens, in units of -g. Takes `logits`."""
    return logits.sub_(lse[:, None]).exp_()


def gradient_of(logits: Tensor, lse: Tensor, entropy: Tensor, of_logp: Tensor, of_entropy: Tensor) -> Tensor:
    """[R, W], [R] each -> [R, W]: p (g + e (log p + H)), the gradient but for its sign and the drawn tokens."""
    logits.sub_(lse[:, None])
    return logits.exp().mul_(logits.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(of_logp[:, None]))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens `rows` and vocabulary `columns`, and where the tokens' own ids are in it."""

    rows: slice
    columns: slice

    def own(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[R, 1] column of each token's id, any where it is not in this block, and [R] whether it is."""
        index = token_ids[self.rows] - self.columns.start
        inside = (index >= 0) & (index < self.columns.stop - self.columns.start)
        return index.clamp(0, self.columns.stop - self.columns.start - 1)[:, None], inside


def blocks(num_tokens: int, vocabulary: int, elements: int) -> Iterator[list[Block]]:
    """The blocks of each `MAX_ROWS` tokens over the whole vocabulary."""
    for first in range(0, num_tokens, MAX_ROWS):
        rows = slice(first, min(first + MAX_ROWS, num_tokens))
        width = max(1, elements // (rows.stop - first))
        yield [Block(rows, slice(start, min(start + width, vocabulary))) for start in range(0, vocabulary, width)]


class _TokenLogp(torch.autograd.Function):
    """See the file's docstring."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, head: Head
    ) -> tuple[Tensor, ...]:
        """[N, hidden], [V, hidden], [V], [N] -> [N] log-probs and entropies, [N, K] ids and log-probs."""
        ctx.set_materialize_grads(False)
        states = hidden.detach().to(head.dtype)
        logp, entropy, lse = (states.new_empty(len(states), dtype=head.exact) for _ in range(3))
        top_ids = token_ids.new_empty(len(states), head.num_top)
        top_logp = logp.new_empty(len(states), head.num_top)
        ctx.kept = {}
        room = KEPT_ELEMENTS if head.keeps else 0
        summed = _compiled(sums_of) if head.compiled else sums_of
        with torch.autocast(hidden.device.type, enabled=False):
            for several in blocks(len(states), len(weight), head.block):
                rows = several[0].rows
                chosen = logp[rows].zero_()
                sums = logp.new_empty(3, len(several), len(chosen))
                best: list[tuple[Tensor, Tensor]] = []
                for index, block in enumerate(several):
                    logits = head.logits(states[rows], weight[block.columns], _part(bias, block))
                    own, inside = block.own(token_ids)
                    chosen.copy_(torch.where(inside, logits.gather(1, own)[:, 0], chosen))
                    torch.stack(summed(logits), out=sums[:, index])
                    if head.num_top:
                        top = logits.topk(min(head.num_top, logits.shape[1]))
                        best.append((top.values, top.indices + block.columns.start))
                    if logits.numel() <= room:
                        room -= logits.numel()
                        ctx.kept[rows.start, block.columns.start] = logits
                    del logits
                largest, total, moment = sums
                overall = largest.amax(0)
                below = largest - overall
                factor = below.exp()
                normaliser = (total * factor).sum(0)
                moment = ((moment + total * below) * factor).sum(0)
                entropy[rows] = normaliser.log() - moment / normaliser
                lse[rows] = overall + normaliser.log()
                chosen.sub_(overall).sub_(normaliser.log())
                if head.num_top:
                    values, ids = (torch.cat(parts, dim=1) for parts in zip(*best, strict=True))
                    top = values.topk(head.num_top)
                    top_ids[rows] = ids.gather(1, top.indices)
                    top_logp[rows] = top.values - overall[:, None] - normaliser.log()[:, None]
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, token_ids, lse, entropy)
        ctx.mark_non_differentiable(top_ids, top_logp, *([] if head.entropy_gradient else [entropy]))
        return logp, entropy, top_ids, top_logp

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logp: Tensor | None, of_entropy: Tensor | None, *of_top: None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of states, weight and bias."""
        hidden, weight, bias, token_ids, lse, entropy = ctx.saved_tensors
        head, kept = ctx.head, ctx.kept
        if of_logp is None:
            of_logp = torch.zeros_like(lse)
        device = hidden.device.type
        weights = _compiled(weights_of) if head.compiled else weights_of
        gradient = _compiled(gradient_of) if head.compiled else gradient_of
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        with torch.autocast(device, enabled=False):
            states = hidden.to(head.dtype)
            # dl is this factor times what is made of a block: so the block itself is not multiplied.
            factor = of_logp.new_full((len(lse),), -head.scale) if of_entropy is not None else -head.scale * of_logp
            scaled = (states * factor[:, None]).to(head.dtype)
            hidden_gradient = torch.zeros_like(hidden, dtype=head.exact) if for_hidden else None
            # Its first block of tokens writes it, if there is any.
            new = torch.empty_like if len(states) else torch.zeros_like
            weight_gradient = new(weight) if for_weight else None
            bias_gradient = torch.zeros_like(bias) if for_bias else None
            for several in blocks(len(states), len(weight), head.block):
                rows = several[0].rows
                for block in several:
                    part = weight[block.columns]
                    logits = kept.pop((rows.start, block.columns.start), None)
                    if logits is None:
                        logits = head.logits(states[rows], part, _part(bias, block))
                    own, inside = block.own(token_ids)
                    if of_entropy is None:
                        dl = weights(logits, lse[rows]).scatter_add_(1, own, -inside.to(logits.dtype)[:, None])
                    else:
                        g = of_logp[rows]
                        dl = gradient(logits, lse[rows], entropy[rows], g, of_entropy[rows])
                        dl.scatter_add_(1, own, -torch.where(inside, g, 0)[:, None])
                    dl = dl.to(head.dtype)
                    if hidden_gradient is not None:
                        head.add_product(hidden_gradient[rows], dl, part.to(head.dtype))
                    if weight_gradient is not None:
                        multiply = head.add_product if rows.start else head.put_product
                        multiply(weight_gradient[block.columns], dl.t(), scaled[rows])
                    if bias_gradient is not None:
                        bias_gradient[block.columns] += dl.t().to(head.exact) @ factor[rows]
                    del logits, dl
            if hidden_gradient is not None:
                hidden_gradient = hidden_gradient.mul_(factor[:, None]).to(hidden.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None


def _part(bias: Tensor | None, block: Block) -> Tensor | None:
    return None if bias is None else bias[block.columns]


def takes(head: nn.Module) -> bool:
    """Whether `token_logp` can stand for a call of `head`: a linear layer on which nothing else hangs."""
    return (
        type(head) in (nn.Linear, OneDNNLinear)
        and not (head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks)
        and not isinstance(head.weight, DTensor)
    )


def token_logp(
    hidden: Tensor,
    head: nn.Linear,
    token_ids: Tensor,
    scale: float = 1.0,
    entropy_gradient: bool = False,
    num_top: int = 0,
    block: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, ...]:
    """[N, hidden] states, [N] ids -> [N] log-probs and entropies, [N, K] ids and log-probs of the likeliest tokens.

    Types are those that the head itself would compute in, autocast included; results are float32, or float64 where the
    head is. The gradient goes to the states and to the head.

    Args:
        hidden: What the tokens are predicted from.
        head: A layer that `takes` accepts.
        token_ids: The tokens.
        scale: Factor of the logits, such as 1 / temperature.
        entropy_gradient: Whether the entropy has a gradient.
        num_top: K, how many.
        block: Logits worked on at once; None: `logits_at_once` of the device.
        compiled: Whether what is done with the logits is compiled. It changes speed and rounding.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    trained = any(tensor.requires_grad for tensor in (hidden, head.weight, head.bias) if tensor is not None)
    how = Head(
        scale=scale,
        dtype=dtype,
        num_top=num_top,
        keeps=trained and torch.is_grad_enabled(),
        entropy_gradient=entropy_gradient,
        block=block or logits_at_once(device),
        onednn=type(head) is OneDNNLinear and products.takes(hidden, head.weight),
        compiled=compiled,
    )
    return _TokenLogp.apply(hidden, head.weight, head.bias, token_ids, how)
