"""Divergences of whole next-token distributions, from the states of policy and reference, in chunks of tokens."""

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
from grpo_lightning.types import UsageError, at_least, require

CHUNK_ELEMENTS = 2**23
"""Fewest logits of each model in a chunk, if there are several: 32 MiB of float32, and a few times as much beside them.

glibc maps blocks of at least this size, and returns them at once. Smaller blocks stay in a heap whose holes do not fit
the next chunk: with a vocabulary of 152k a run took 4.9 GiB instead of 1.9.
"""
IMPOSSIBLE = -1e4
"""Lowest logit, so that a token which both models exclude adds 0."""


class FullVocabulary(KLEstimator):
    """Computes the divergence of the whole distributions of π_θ and π_ref before each sampled token.

    Every token of the vocabulary teaches, so only the prefix is random in the gradient, not the token. With
    p = softmax(z_θ/τ) and q = softmax(z_ref/τ), z the logits at the sampling temperature, it is τ² times

    - `reverse`: KL(p ‖ q), whose gradient `K2` estimates from the sampled token (MiniLLM, arXiv 2306.08543)
    - `forward`: KL(q ‖ p), which covers all that the reference may write (Hinton et al., arXiv 1503.02531)
    - `jensen_shannon`: w KL(q ‖ m) + (1 - w) KL(p ‖ m), m = w q + (1 - w) p (GKD, arXiv 2306.13649)

    Args:
        divergence: `reverse`, `forward` or `jensen_shannon`.
        top_k: Compare the k likeliest tokens, by π_θ for `reverse` and else by π_ref, and all other tokens as one.
            None compares all. It bounds the divergence from below.
        temperature: τ. Above 1 it shows the tokens that a confident teacher finds second best.
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
        self.divergence = divergence
        self.top_k = top_k
        self.temperature = temperature
        self.mixture = mixture

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        """[N] float32 k3 of the sampled tokens, for the inspector; the update reads whole distributions."""
        return K3()(logp, ref_logp, old_logp)

    def reading(self, reference: PolicySnapshot, policy: Policy, rollouts: Any) -> Any:
        """Computes the reference's states, and returns the function that compares them with the policy's states."""
        threads = getattr(policy.compute, "threads", 1)
        if threads > 1 and policy.adapter is not None and not isinstance(reference, Teacher):
            raise UsageError(
                f"policy.compute.threads={threads}: the reference is the policy with other weights. Give 1"
            )
        is_sharded = any(isinstance(module, FSDPModule) for module in reference.modules())
        with torch.no_grad(), policy.evaluating() if policy.dropout else nullcontext():
            states = reference.scored(policy, rollouts, partial(States.read, keeps_head=is_sharded)).read
        # The cache now holds weights without gradient, which may be the policy's weights.
        torch.clear_autocast_cache()
        return partial(self.compare, states_of_teachers=states, temperature=rollouts.temperature)

    def compare(self, hidden: Tensor, head: Head, states_of_teachers: list[States], temperature: float) -> Tensor:
        """[N] float32 divergences with gradient.

        Args:
            hidden: [N, hidden] states of the policy, with gradient.
            head: The policy's head.
            states_of_teachers: The states of the reference, or of each teacher for its tokens.
            temperature: The sampling temperature.
        """
        divergence = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        for states in states_of_teachers:
            rows = hidden if states.tokens is None else hidden[states.tokens]
            of_chunk = partial(self._of_chunk, head, states.head, temperature * self.temperature)
            num_chunks = max(1, len(rows) // math.ceil(CHUNK_ELEMENTS / head.vocab_size))
            # Logits of several chunks are computed again in the backward, so that only one chunk is in memory.
            is_recomputed = torch.is_grad_enabled() and num_chunks > 1
            chunks = [
                checkpoint(of_chunk, *pair, use_reentrant=False) if is_recomputed else of_chunk(*pair)
                for pair in zip(rows.tensor_split(num_chunks), states.hidden.tensor_split(num_chunks), strict=True)
            ]
            values = torch.cat(chunks)
            divergence = values if states.tokens is None else divergence.index_put((states.tokens,), values)
        return divergence

    def _of_chunk(self, head: Head, ref_head: Head, temperature: float, hidden: Tensor, ref_hidden: Tensor) -> Tensor:
        """[n] divergences of a chunk, from [n, hidden] states of policy and reference."""
        with torch.no_grad():
            ref_logits = ref_head(ref_hidden)
        logits = head(hidden)
        # Models of one family may pad their vocabularies to different sizes.
        width = min(logits.shape[1], ref_logits.shape[1])
        p, q = ((z[:, :width] / temperature).clamp(min=IMPOSSIBLE).log_softmax(-1) for z in (logits, ref_logits))
        if self.top_k is not None and self.top_k < width:
            likeliest = (p if self.divergence == "reverse" else q).detach().topk(self.top_k).indices
            p = coarse(p, likeliest)
            q = coarse(q, likeliest)
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


def coarse(logp: Tensor, ids: Tensor) -> Tensor:
    """[n, k + 1] log-probs of the [n, k] ids, and of all other ids together, from [n, V] log-probs."""
    others_logp = logp.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(1, ids), others_logp], dim=1)
