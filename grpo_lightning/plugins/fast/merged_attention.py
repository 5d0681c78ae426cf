"""Attention whose keys are in several parts: each by a fused kernel, the outputs merged by their log-sum-exps.

With o_p and l_p the output and the log-sum-exp of a query over the keys of part p, its output over all of them is
o = sum_p exp(l_p - l) o_p with l = log sum_p exp(l_p): each o_p is an average by weights that sum to exp(l_p).

A kernel's backward makes the weights again, P = exp(s - l), and of them dS = P * (dP - rowsum(do * o))
(FlashAttention-2, arXiv 2307.08691, algorithm 2). Given the merged o and l, these are the weights and sums over all
keys. So the gradients of the calls add up to the exact one, as in Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_lightning.plugins.fast.copies import Bucket
from grpo_lightning.plugins.fast.parts import Call

CALL = 16000
"""Scores that could be computed in the time that a call takes by itself."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers that decide whether parts or copies are faster. Costs are in scores of one head, on the busiest thread.

    Measured with torch 2.13 on one core of an AMD EPYC. A kernel's call over n queries and L keys costs
    (n + 20) (L + 30) scores per head, forward and backward; one takes 6 ns at D = 32, 10 ns at D = 64. To merge a part
    costs as much as 30 more keys, to copy a number and its gradient a third of a score, and a call by itself `CALL`.
    """

    query: int
    key: int
    size: int
    threads: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> "Heads":
        """Those of states [T, H, D] and [T, K, D]."""
        return cls(query.shape[1], key.shape[1], query.shape[2], torch.get_num_threads())

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.query // self.key

    def _call(self, units: int, queries: int, keys: int) -> float:
        """Of a call that `units` pieces of equal size are made of, each worked on by one thread."""
        return CALL + -(-units // self.threads) * (queries + 20) * (keys + 30)

    def cost(self, calls: Sequence[Call]) -> float:
        """Of attention in parts."""
        return sum(
            self._call(call.batch * self.key, call.part.queries, call.part.keys + (0 if call.part.causal else 30))
            for call in calls
        )

    def cost_of(self, buckets: Sequence[Bucket]) -> float:
        """Of attention by copies."""
        copied = sum(2 * self.query * bucket.queries + 2 * self.key * bucket.keys for bucket in buckets) * self.size
        return copied / 3 / self.threads + sum(
            self._call(bucket.rows * self.key, self.groups * bucket.length, bucket.prefix + bucket.length)
            if bucket.prefix
            else self._call(bucket.rows * self.query, bucket.length, bucket.length)
            for bucket in buckets
        )


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[Call], scaling: float | None
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        exact = torch.promote_types(query.dtype, torch.float32)
        merged = query.new_empty(query.shape, dtype=exact)
        total = query.new_empty((*query.shape[:2], 1), dtype=exact)
        for call in calls:
            states = call.of_queries(query), call.of_keys(key), call.of_keys(value)
            output, lse = kernel(*states, 0.0, call.part.causal, scale=scaling)
            so_far, lse_so_far = call.of_queries(merged), call.of_queries(total)
            if call.part.causal:
                so_far.copy_(output)
                lse_so_far.copy_(lse[..., None])
            else:
                lse = lse[..., None]
                so_far.lerp_(output.to(exact), (lse - lse_so_far).sigmoid_())
                torch.logaddexp(lse_so_far, lse, out=lse_so_far)
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, total)
        ctx.calls, ctx.scaling = calls, scaling
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, merged, total = ctx.saved_tensors
        gradient = dense(gradient)
        sums = [states.new_zeros(states.shape, dtype=total.dtype) for states in (query, key, value)]
        for call in ctx.calls:
            found = kernel(
                call.of_queries(gradient),
                call.of_queries(query),
                call.of_keys(key),
                call.of_keys(value),
                call.of_queries(merged),
                call.of_queries(total)[..., 0],
                0.0,
                call.part.causal,
                scale=ctx.scaling,
            )
            call.of_queries(sums[0]).add_(found[0])
            for into, own in zip(sums[1:], found[1:], strict=True):
                call.of_keys(into, shared=False).add_(own.sum(0, keepdim=True) if call.whole_rows else own)
        return *(states.to(query.dtype) for states in sums), None, None


def dense(states: Tensor) -> Tensor:
    """The states, or a copy, with the last dimension side by side in memory."""
    return states if states.stride(-1) == 1 else states.contiguous()


def takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """True where `merged_attention` is for these states."""
    return (
        query.device.type == "cpu"
        and dropout == 0
        and query.dtype == key.dtype == value.dtype
        and query.dtype in DTYPES
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
    )


def merged_attention(
    query: Tensor, key: Tensor, value: Tensor, calls: Sequence[Call], scaling: float | None = None
) -> Tensor:
    """[T, H, D], [T, K, D], [T, K, D] -> [T, H, D].

    The first call of each query is causal, and no key is in two of its calls.
    """
    return _Merged.apply(dense(query), dense(key), dense(value), calls, scaling)
