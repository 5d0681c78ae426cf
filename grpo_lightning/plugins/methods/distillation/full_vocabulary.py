"""Divergences of whole next-token distributions, from the states of policy and reference and in chunks of tokens."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from grpo_lightning.maths.kl import K3, KLEstimator
from grpo_lightning.plugins.methods.distillation.states import States
from grpo_lightning.plugins.methods.distillation.teacher import Teacher
from grpo_lightning.policy.architecture import Head
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import PolicySnapshot
from grpo_lightning.types import at_least, require

CHUNK_ELEMENTS = 2**23
"""Fewest logits of each model in one of several chunks: 32 MiB of float32, and a few times as much beside them.

glibc maps what is at least so large, and gives it back at once. What is a little smaller stays in a heap whose holes
do not fit the next chunk: with a vocabulary of 152k a run took 4.9 GiB instead of 1.9.
"""
IMPOSSIBLE = -1e4  # logits are no lower, so that a token which both models exclude adds 0


class FullVocabulary(KLEstimator):
    """The divergence of the whole distributions of π_θ and π_ref before each drawn token, not one drawn from them.

    Every token of the vocabulary teaches, so the gradient has no sampling noise beyond that of the prefix. With
    p = softmax(z_θ/τ) and q = softmax(z_ref/τ), z the logits at the sampling temperature, it is τ² times

    - `reverse`: KL(p ‖ q), whose gradient `K2` estimates from the drawn token (MiniLLM, arXiv 2306.08543)
    - `forward`: KL(q ‖ p), which covers all that the reference may write (Hinton et al., arXiv 1503.02531)
    - `jensen_shannon`: w KL(q ‖ m) + (1 - w) KL(p ‖ m), m = w q + (1 - w) p (GKD, arXiv 2306.13649)

    Args:
        divergence: One of these.
        top_k: Compare the k likeliest tokens, those of π_θ for `reverse` and else of π_ref, and the others as one.
            None compares all. It bounds the divergence from below.
        temperature: τ. Above 1 it brings out what a sure teacher finds second best.
        mixture: w of `jensen_shannon`: it behaves as w times `forward` near 0, and as 1 - w times `reverse` near 1.
    """

    reads_distributions = True

    def __init__(
        self,
        divergence: Literal["reverse", "forward", "jensen_shannon"] = "reverse",
        top_k: int | None = None,
        temperature: float = 1.0,
        mixture: float = 0.5,
    ) -> None:
        at_least("objective.kl.top_k", top_k, 1)
        require(temperature > 0, f"objective.kl.temperature={temperature}: give more than 0")
        require(0 < mixture < 1, f"objective.kl.mixture={mixture}: give more than 0 and less than 1")
        self.divergence, self.top_k, self.temperature, self.mixture = divergence, top_k, temperature, mixture

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        """[N] k3 of the drawn tokens, for what only watches; the update reads whole distributions."""
        return K3()(logp, ref_logp, old_logp)

    def reading(self, reference: PolicySnapshot, policy: Policy, rollouts: Any) -> Any:
        """As `KLEstimator.reading`. The reference's states are computed here, before the policy's forward."""
        threads, own = getattr(policy.compute, "threads", 1), policy.adapter is not None
        if threads > 1 and own and not isinstance(reference, Teacher):
            require(False, f"policy.compute.threads={threads}: the reference is the policy with other weights. Give 1")
        sharded = any(isinstance(module, FSDPModule) for module in reference.modules())
        with torch.no_grad(), policy.evaluating() if policy.dropout else nullcontext():
            states = reference.scored(policy, rollouts, partial(States.read, keeps_head=sharded)).read
        torch.clear_autocast_cache()  # It holds weights without gradient now, which may be the policy's.
        return partial(self.compare, theirs=states, temperature=rollouts.temperature)

    def compare(self, hidden: Tensor, head: Head, theirs: list[States], temperature: float) -> Tensor:
        """[N] divergences with gradient, from the policy's [N, hidden] states and those of the reference."""
        found = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        for states in theirs:
            mine = hidden if states.tokens is None else hidden[states.tokens]
            of_chunk = partial(self._of_chunk, head, states.head, temperature * self.temperature)
            num_chunks = max(1, len(mine) // math.ceil(CHUNK_ELEMENTS / head.vocab_size))
            twice = torch.is_grad_enabled() and num_chunks > 1
            chunks = [
                checkpoint(of_chunk, *pair, use_reentrant=False) if twice else of_chunk(*pair)
                for pair in zip(mine.tensor_split(num_chunks), states.hidden.tensor_split(num_chunks), strict=True)
            ]
            values = torch.cat(chunks)
            found = values if states.tokens is None else found.index_put((states.tokens,), values)
        return found

    def _of_chunk(self, head: Head, its_head: Head, temperature: float, mine: Tensor, its: Tensor) -> Tensor:
        with torch.no_grad():
            logits = its_head(its)
        own = head(mine)
        # Models of one family may pad their vocabularies to different sizes.
        width = min(own.shape[1], logits.shape[1])
        p, q = ((one[:, :width] / temperature).clamp(min=IMPOSSIBLE).log_softmax(-1) for one in (own, logits))
        if self.top_k is not None and self.top_k < width:
            likeliest = (p if self.divergence == "reverse" else q).detach().topk(self.top_k).indices
            p, q = coarse(p, likeliest), coarse(q, likeliest)
        return self.of(p, q) * self.temperature**2

    def of(self, p: Tensor, q: Tensor) -> Tensor:
        """[n] divergences of [n, V] log-probs p of the policy and q of the reference."""
        if self.divergence == "reverse":
            return kl(p, q)
        if self.divergence == "forward":
            return kl(q, p)
        w = self.mixture
        m = torch.logaddexp(q + math.log(w), p + math.log1p(-w))
        return w * kl(q, m) + (1 - w) * kl(p, m)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """[n] KL(p ‖ q) of [n, V] log-probs."""
    return (p.exp() * (p - q)).sum(-1)


def coarse(logp: Tensor, kept: Tensor) -> Tensor:
    """[n, V] log-probs -> [n, k + 1]: those of the `kept` [n, k] ids, and that of all others together."""
    rest = logp.scatter(1, kept, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(1, kept), rest], dim=1)
