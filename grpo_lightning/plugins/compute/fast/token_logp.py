"""Log-probs and entropies of sampled tokens in one pass over the vocabulary, with a hand-written backward pass.

The head is applied to the vocabulary block by block. Each block is summed while it is in the cache: its largest logit
m, s = sum exp(l - m) and u = sum (l - m) exp(l - m). With all blocks rescaled to one m,

    log p_i = l_i - m - log s        H = log s - u / s

The backward pass computes p again from the logits. These are kept up to a limit, and computed again beyond it. With g
the gradient of log p_i and e the gradient of H,

    dl_j = g (1[j = i] - p_j) - e p_j (log p_j + H)

The weight's gradient is written once per block. The states' gradient is summed over blocks in float32.
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

KEPT_ELEMENTS = 2**27
"""Most logits kept for the backward pass: 512 MiB of float32."""
LOGP_OF_ZERO = -1e4
"""Log-prob below which a probability is 0, in float64 too."""
MAX_ROWS = 4096
"""Most tokens worked on at once, so that a block is never narrow."""


def logits_at_once(device: str) -> int:
    """Returns the elements of a block: on a CPU 8 MiB of float32, which its cache holds; on a GPU more per launch."""
    return 2**21 if device == "cpu" else 2**24


@dataclass(frozen=True, slots=True)
class BlockedHead:
    """Settings of a pass over the vocabulary."""

    scale: float
    """Factor of the logits, such as 1 / temperature."""
    dtype: torch.dtype
    """Type of the products. All other numbers are float32, or float64 if the products are."""
    num_top: int
    """K, likeliest tokens returned for each position."""
    keeps: bool
    """True if a backward pass will follow, which reads the logits again."""
    entropy_gradient: bool
    """True if the entropies have a gradient."""
    block: int
    """Logits worked on at once."""
    onednn: bool = False
    """True if oneDNN multiplies."""

    @property
    def exact(self) -> torch.dtype:
        """Type of the logits, sums and results."""
        return torch.promote_types(self.dtype, torch.float32)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
        """[N, hidden], [V, hidden], [V] -> [N, W] scaled logits of some columns, in a new tensor."""
        bias = None if bias is None else bias[columns].to(self.dtype)
        multiply = product if self.onednn else F.linear
        logits = multiply(hidden, weight[columns].to(self.dtype), bias).to(self.exact)
        return logits if self.scale == 1 else logits.mul_(self.scale)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, is_first: bool = False) -> None:
        """Adds left times right to `total`, which may be of a wider type; overwrites it if `is_first`."""
        if self.onednn or total.dtype != left.dtype:
            summand = product(left, right.t()) if self.onednn else left @ right
            if is_first:
                total.copy_(summand)
            else:
                total.add_(summand)
        elif is_first:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)

    def blocks(self, num_tokens: int, vocabulary: int) -> Iterator[tuple[slice, list[slice]]]:
        """Yields slices of at most `MAX_ROWS` tokens, each with the column slices of its blocks of the vocabulary."""
        for start in range(0, num_tokens, MAX_ROWS):
            rows = slice(start, min(start + MAX_ROWS, num_tokens))
            width = max(1, self.block // (rows.stop - start))
            yield rows, [slice(column, min(column + width, vocabulary)) for column in range(0, vocabulary, width)]


def columns_of_tokens(token_ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """[R, 1] column of each token's id in a block, and [R] bool, False for ids outside it, whose column is any."""
    column = token_ids - columns.start
    width = columns.stop - columns.start
    return column.clamp(0, width - 1)[:, None], (column >= 0) & (column < width)


def sums_of_block(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R, W] logits of a block -> [R] m, s and u of the file's docstring."""
    # A block may be -inf throughout.
    largest = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    shifted = logits - largest[:, None]
    weights = shifted.exp()
    # A logit of -inf adds nothing, though -inf times 0 is NaN. A model's own NaN stays in `weights`.
    moment = shifted.mul_(weights).nansum(-1)
    return largest, weights.sum(-1), moment


def sums_of_all(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[3, blocks, R] m, s and u of every block -> [R] m, s and u of the vocabulary."""
    largest, total, moment = sums
    overall = largest.amax(0)
    # exp(l - overall) is exp(l - m) times this factor, and l - overall is l - m plus `below`.
    below = largest - overall
    factor = below.exp()
    return overall, (total * factor).sum(0), ((moment + total * below) * factor).sum(0)


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
        ctx.logits_by_block = {}
        num_free = KEPT_ELEMENTS if head.keeps else 0
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, blocks in head.blocks(len(states), len(weight)):
                # Every block is read once: the logit of the token itself, the sums, and candidates for the top.
                chosen = logp[rows].zero_()
                sums = logp.new_empty(3, len(blocks), len(chosen))
                tops: list[tuple[Tensor, Tensor]] = []
                for index, columns in enumerate(blocks):
                    logits = head.logits(states[rows], weight, bias, columns)
                    column, is_inside = columns_of_tokens(token_ids[rows], columns)
                    chosen.copy_(torch.where(is_inside, logits.gather(1, column)[:, 0], chosen))
                    torch.stack(sums_of_block(logits), out=sums[:, index])
                    if head.num_top:
                        top = logits.topk(min(head.num_top, logits.shape[1]))
                        tops.append((top.values, top.indices + columns.start))
                    if logits.numel() <= num_free:
                        num_free -= logits.numel()
                        ctx.logits_by_block[rows.start, columns.start] = logits
                    del logits

                # From logits to log-probs, by the sums over all blocks.
                overall, total, moment = sums_of_all(sums)
                log_total = total.log()
                entropy[rows] = log_total - moment / total
                lse[rows] = overall + log_total
                chosen.sub_(overall).sub_(log_total)
                if head.num_top:
                    values, ids = (torch.cat(tensors, dim=1) for tensors in zip(*tops, strict=True))
                    top = values.topk(head.num_top)
                    top_ids[rows] = ids.gather(1, top.indices)
                    top_logp[rows] = top.values - overall[:, None] - log_total[:, None]
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, token_ids, lse, entropy)
        ctx.mark_non_differentiable(top_ids, top_logp, *([] if head.entropy_gradient else [entropy]))
        return logp, entropy, top_ids, top_logp

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logp_gradient: Tensor | None, entropy_gradient: Tensor | None, *top_gradients: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, lse, entropy = ctx.saved_tensors
        head: BlockedHead = ctx.head
        if logp_gradient is None:
            logp_gradient = torch.zeros_like(lse)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.to(head.dtype)
            # dl is [N] `factor` times what is made of a block. It multiplies the states, which are fewer numbers.
            has_uniform = entropy_gradient is not None
            factor = logp_gradient.new_full((len(lse),), -head.scale) if has_uniform else -head.scale * logp_gradient
            scaled = (states * factor[:, None]).to(head.dtype)
            hidden_gradient = torch.zeros_like(hidden, dtype=head.exact) if needs_hidden else None
            # The first tokens overwrite it, if there are any.
            new = torch.empty_like if len(states) else torch.zeros_like
            weight_gradient = new(weight) if needs_weight else None
            bias_gradient = torch.zeros_like(bias) if needs_bias else None
            for rows, blocks in head.blocks(len(states), len(weight)):
                for columns in blocks:
                    logits = ctx.logits_by_block.pop((rows.start, columns.start), None)
                    if logits is None:
                        logits = head.logits(states[rows], weight, bias, columns)
                    column, is_inside = columns_of_tokens(token_ids[rows], columns)
                    logits.sub_(lse[rows, None])

                    # dl / factor, in the logits' memory where it is p alone.
                    if entropy_gradient is None:
                        dl = logits.exp_()
                        subtracted = is_inside.to(logits.dtype)
                    else:
                        # p (g + e (log p + H)), in which p is 0 far above the smallest log p
                        g = logp_gradient[rows]
                        dl = logits.exp()
                        logits.clamp_(min=LOGP_OF_ZERO)
                        dl.mul_(logits.add_(entropy[rows, None]).mul_(entropy_gradient[rows, None]).add_(g[:, None]))
                        subtracted = torch.where(is_inside, g, 0)
                    dl = dl.scatter_add_(1, column, -subtracted[:, None]).to(head.dtype)

                    if hidden_gradient is not None:
                        head.add_product(hidden_gradient[rows], dl, weight[columns].to(head.dtype))
                    if weight_gradient is not None:
                        head.add_product(weight_gradient[columns], dl.t(), scaled[rows], is_first=not rows.start)
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

    Products have the type that the head itself would compute in, autocast included. Results are float32, or float64 if
    the head is. Gradients go to the states and to the head.

    Args:
        hidden: [N, hidden] states.
        head: A layer that is no more than the product with its weight (`products.is_plain`).
        token_ids: [N] int64 sampled tokens.
        scale: Factor of the logits, such as 1 / temperature.
        entropy_gradient: Let gradients flow through the entropies.
        num_top: K, likeliest tokens to return for each position.
        block: Logits worked on at once; None for as many as suit the device.
    """
    device = hidden.device.type
    is_trained = any(tensor.requires_grad for tensor in (hidden, head.weight, head.bias) if tensor is not None)
    settings = BlockedHead(
        scale=scale,
        dtype=head_dtype(head),
        num_top=num_top,
        keeps=is_trained and torch.is_grad_enabled(),
        entropy_gradient=entropy_gradient,
        block=block or logits_at_once(device),
        onednn=type(head) is OneDNNLinear and products.takes(hidden, head.weight),
    )
    return _TokenLogp.apply(hidden, head.weight, head.bias, token_ids, settings)
