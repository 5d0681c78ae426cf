"""Log-probs and entropies of drawn tokens in one pass over the vocabulary, with a backward pass of its own.

The head is applied to one block of the vocabulary after the other. Each block is summed while it is in the cache: its
largest logit m, s = sum exp(l - m) and u = sum (l - m) exp(l - m). With all blocks rescaled to one m,

    log p_i = l_i - m - log s        H = log s - u / s

The backward pass makes p again from the logits, which are kept up to a limit and computed again beyond it. With g the
gradient of log p_i and e that of H,

    dl_j = g (1[j = i] - p_j) - e p_j (log p_j + H)

The weight's gradient is written once per block, and that of the states is summed over blocks in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grpo_lightning.plugins.compute.fast import products
from grpo_lightning.plugins.compute.fast.products import OneDNNLinear, product
from grpo_lightning.policy.architecture import head_dtype

KEPT_ELEMENTS = 2**27  # logits kept for the backward pass: 512 MiB of float32
LOGP_OF_ZERO = -1e4
"""Probabilities are 0 below it, in float64 too."""
MAX_ROWS = 4096  # tokens worked on at once, so that a block is never narrow


def logits_at_once(device: str) -> int:
    """Elements of a block: on a CPU 8 MiB of float32, which its cache holds; a GPU needs more work per launch."""
    return 2**21 if device == "cpu" else 2**24


@dataclass(frozen=True, slots=True)
class BlockedHead:
    """A linear head and how its logits are scaled."""

    scale: float
    dtype: torch.dtype  # type of the products; everything else is float32, or float64 where this is
    num_top: int
    keeps: bool  # whether there will be a backward pass
    entropy_gradient: bool
    block: int
    onednn: bool = False

    @property
    def exact(self) -> torch.dtype:
        """Type of logits, sums and results."""
        return torch.promote_types(self.dtype, torch.float32)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
        """[N, hidden], [V, hidden], [V] -> [N, W] scaled logits of some columns, a tensor of their own."""
        bias = None if bias is None else bias[columns].to(self.dtype)
        multiply = product if self.onednn else F.linear
        logits = multiply(hidden, weight[columns].to(self.dtype), bias).to(self.exact)
        return logits if self.scale == 1 else logits.mul_(self.scale)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, first: bool = False) -> None:
        """Adds left times right to `total`, which may be of a wider type; the `first` one is written there."""
        if self.onednn or total.dtype != left.dtype:
            found = product(left, right.t()) if self.onednn else left @ right
            _ = total.copy_(found) if first else total.add_(found)
        elif first:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)

    def blocks(self, num_tokens: int, vocabulary: int) -> Iterator[tuple[slice, list[slice]]]:
        """At most `MAX_ROWS` tokens after the other, and the blocks of the vocabulary for each."""
        for first in range(0, num_tokens, MAX_ROWS):
            rows = slice(first, min(first + MAX_ROWS, num_tokens))
            width = max(1, self.block // (rows.stop - first))
            yield rows, [slice(at, min(at + width, vocabulary)) for at in range(0, vocabulary, width)]


def own_columns(token_ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """[R, 1] column of each token's id, any where it is not among these, and [R] whether it is."""
    index, width = token_ids - columns.start, columns.stop - columns.start
    return index.clamp(0, width - 1)[:, None], (index >= 0) & (index < width)


class _TokenLogp(torch.autograd.Function):
    """See the file's docstring."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, head: BlockedHead
    ) -> tuple[Tensor, ...]:
        """[N, hidden], [V, hidden], [V], [N] -> [N] log-probs and entropies, [N, K] ids and log-probs."""
        ctx.set_materialize_grads(False)
        states = hidden.detach().to(head.dtype)
        logp, entropy, lse = (states.new_empty(len(states), dtype=head.exact) for _ in range(3))
        top_ids = token_ids.new_empty(len(states), head.num_top)
        top_logp = logp.new_empty(len(states), head.num_top)
        ctx.kept, room = {}, KEPT_ELEMENTS if head.keeps else 0
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, blocks in head.blocks(len(states), len(weight)):
                chosen = logp[rows].zero_()
                sums = logp.new_empty(3, len(blocks), len(chosen))
                best: list[tuple[Tensor, Tensor]] = []
                for index, columns in enumerate(blocks):
                    logits = head.logits(states[rows], weight, bias, columns)
                    own, inside = own_columns(token_ids[rows], columns)
                    chosen.copy_(torch.where(inside, logits.gather(1, own)[:, 0], chosen))
                    # A block may be -inf throughout.
                    largest = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
                    shifted = logits - largest[:, None]
                    weights = shifted.exp()
                    # A logit of -inf adds nothing, though -inf times 0 is NaN. A model's own NaN stays in `weights`.
                    moments = shifted.mul_(weights).nansum(-1)
                    torch.stack((largest, weights.sum(-1), moments), out=sums[:, index])
                    if head.num_top:
                        top = logits.topk(min(head.num_top, logits.shape[1]))
                        best.append((top.values, top.indices + columns.start))
                    if logits.numel() <= room:
                        room -= logits.numel()
                        ctx.kept[rows.start, columns.start] = logits
                    del logits, shifted, weights
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
        hidden, weight, bias, token_ids, lse, entropy = ctx.saved_tensors
        head: BlockedHead = ctx.head
        if of_logp is None:
            of_logp = torch.zeros_like(lse)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.to(head.dtype)
            # dl is this factor times what is made of a block: so the block itself is not multiplied.
            factor = of_logp.new_full((len(lse),), -head.scale) if of_entropy is not None else -head.scale * of_logp
            scaled = (states * factor[:, None]).to(head.dtype)
            hidden_gradient = torch.zeros_like(hidden, dtype=head.exact) if for_hidden else None
            # Its first block of tokens writes it, if there is any.
            new = torch.empty_like if len(states) else torch.zeros_like
            weight_gradient = new(weight) if for_weight else None
            bias_gradient = torch.zeros_like(bias) if for_bias else None
            for rows, blocks in head.blocks(len(states), len(weight)):
                for columns in blocks:
                    logits = ctx.kept.pop((rows.start, columns.start), None)
                    if logits is None:
                        logits = head.logits(states[rows], weight, bias, columns)
                    own, inside = own_columns(token_ids[rows], columns)
                    logits.sub_(lse[rows, None])
                    if of_entropy is None:
                        dl, of_own = logits.exp_(), inside.to(logits.dtype)
                    else:
                        # p (g + e (log p + H)), in which p is 0 far above the smallest log p
                        g, dl = of_logp[rows], logits.exp()
                        logits.clamp_(min=LOGP_OF_ZERO)
                        dl.mul_(logits.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).add_(g[:, None]))
                        of_own = torch.where(inside, g, 0)
                    dl = dl.scatter_add_(1, own, -of_own[:, None]).to(head.dtype)
                    if hidden_gradient is not None:
                        head.add_product(hidden_gradient[rows], dl, weight[columns].to(head.dtype))
                    if weight_gradient is not None:
                        head.add_product(weight_gradient[columns], dl.t(), scaled[rows], first=not rows.start)
                    if bias_gradient is not None:
                        bias_gradient[columns] += dl.t().to(head.exact) @ factor[rows]
                    del logits, dl
            if hidden_gradient is not None:
                hidden_gradient = hidden_gradient.mul_(factor[:, None]).to(hidden.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None


def token_logp(
    hidden: Tensor,
    head: nn.Linear,
    token_ids: Tensor,
    scale: float = 1.0,
    entropy_gradient: bool = False,
    num_top: int = 0,
    block: int | None = None,
) -> tuple[Tensor, ...]:
    """[N, hidden] states, [N] ids -> [N] log-probs and entropies, [N, K] ids and log-probs of the likeliest tokens.

    Types are those that the head itself would compute in, autocast included; results are float32, or float64 where the
    head is. The gradient goes to the states and to the head. The head is no more than the product with its weight
    (`products.is_plain`). `scale` is the factor of the logits, such as 1 / temperature; `block` the number of logits
    worked on at once, by default that of the device.
    """
    device = hidden.device.type
    trained = any(tensor.requires_grad for tensor in (hidden, head.weight, head.bias) if tensor is not None)
    how = BlockedHead(
        scale=scale,
        dtype=head_dtype(head),
        num_top=num_top,
        keeps=trained and torch.is_grad_enabled(),
        entropy_gradient=entropy_gradient,
        block=block or logits_at_once(device),
        onednn=type(head) is OneDNNLinear and products.takes(hidden, head.weight),
    )
    return _TokenLogp.apply(hidden, head.weight, head.bias, token_ids, how)
