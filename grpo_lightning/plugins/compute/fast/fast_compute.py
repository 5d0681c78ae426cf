"""A policy's log-probs, faster and in less memory than `Compute` finds them."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.compute.fast import products, shared_prefix
from grpo_lightning.plugins.compute.fast.fused_layers import fuse
from grpo_lightning.plugins.compute.fast.shared_prefix import SharedPrefix
from grpo_lightning.plugins.compute.fast.threads import in_threads
from grpo_lightning.plugins.compute.fast.token_logp import token_logp
from grpo_lightning.policy.architecture import Head, evaluating
from grpo_lightning.policy.compute import TRIAL, Compute, Layout, PaddedRows, TokenLogp
from grpo_lightning.policy.machine import Machine
from grpo_lightning.types import at_least

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class Fast(Compute):
    """Computes a group's prompt once, and log-probs in one pass over the vocabulary.

    Args:
        attention: As in `Compute`.
        gradient_checkpointing: As in `Compute`.
        share_prefix: Pass a group's prompt through the model once instead of once per completion, where the
            architecture allows it (full attention everywhere). It changes only speed and memory.
        fused: Compute log-probs and entropies in one pass over the vocabulary with a backward of its own, where the
            head is a plain linear layer; norms and gated MLPs of Llama's form in fewer passes. It changes only speed,
            memory and rounding.
        products: What multiplies float32 matrices on a CPU: `torch` leaves it to the library that torch was built with,
            `onednn` is about twice as fast on AMD's processors with AVX-512, and `auto` takes it on AMD. It changes
            only speed and rounding.
        threads: On a CPU, pass so many micro-batches at once in an update, each in a thread with a part of the cores.
            It is faster for small models, whose products are too small to be divided among cores, and takes as many
            times the memory of a micro-batch. It changes only speed, memory and rounding.
    """

    def __init__(
        self,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        share_prefix: bool = True,
        fused: bool = True,
        products: Literal["torch", "onednn", "auto"] = "torch",
        threads: int = 1,
    ) -> None:
        super().__init__(attention, gradient_checkpointing)
        at_least("model.policy.compute.threads", threads, 1)
        self.share_prefix = share_prefix
        self.fused = fused
        self.products = products
        self.threads = threads
        self.needs_mask = True
        """True if padded rows need a mask of transformers; known after `adapt`."""
        self.logits_at_once: int | None = None
        """Elements of the blocks that fused log-probs are computed in; None: as many as suit the device."""

    def check(self) -> None:
        products.by_onednn(self.products)

    def prepare(self, model: PreTrainedModel) -> None:
        if products.by_onednn(self.products):
            products.use_onednn(model)
        if self.fused:
            fuse(model)
        super().prepare(model)

    @torch.no_grad()
    def adapt(self, model: PreTrainedModel, trunk: nn.Module) -> None:
        """As `Compute.adapt`; tries whether the model computes the same with a shared prefix.

        Where it computes the same with this package's attention, that becomes its attention in any case.
        """
        super().adapt(model, trunk)
        if model.config._attn_implementation != "sdpa":
            return
        trial = TRIAL.to(next(model.parameters()).device)
        attends = shares = unmasked = False
        with evaluating(model):
            expected = self.hidden(trunk, trial, PaddedRows.from_rollouts(trial))
            try:
                model.set_attn_implementation(shared_prefix.ATTENTION)
                attends = same(self.hidden(trunk, trial, PaddedRows.from_rollouts(trial)), expected)
                if attends and has_full_attention(model.config):
                    shares = same(self.hidden(trunk, trial, SharedPrefix.from_rollouts(trial)), expected)
                    unmasked = same(self.hidden(trunk, trial, UnmaskedRows.from_rollouts(trial)), expected)
            except Exception as error:  # A model that fails with another attention keeps its own.
                log.debug("%s keeps transformers' attention: %s", type(model).__name__, error)
            finally:
                if not attends:
                    model.set_attn_implementation("sdpa")
        self.needs_mask = not unmasked
        self.shares_prefix = shares and self.share_prefix

    def layout(self, rollouts: Rollouts) -> Layout:
        if self.shares_prefix and len(rollouts) > len(rollouts.sizes.prompt_lengths):
            return SharedPrefix.from_rollouts(rollouts)
        return super().layout(rollouts) if self.needs_mask else UnmaskedRows.from_rollouts(rollouts)

    def score(
        self, head: Head, hidden: Tensor, token_ids: Tensor, temperature: float, entropy_gradient: bool, num_top: int
    ) -> TokenLogp:
        if not self.fused or head.soft_caps or not products.is_plain(head.embedding):
            return super().score(head, hidden, token_ids, temperature, entropy_gradient, num_top)
        scale = head.scale / temperature
        logp, entropy, *top = token_logp(
            hidden, head.embedding, token_ids, scale, entropy_gradient, num_top, self.logits_at_once
        )
        return TokenLogp(logp.float(), entropy.float(), *((top[0], top[1].float()) if num_top else ()))

    def gradients(
        self, micro_batches: Sequence[T], forward: Callable[[T], tuple[Tensor, R]], machine: Machine
    ) -> Iterator[R]:
        alone = machine.alone() if self.threads > 1 else None
        if alone is None:
            yield from super().gradients(micro_batches, forward, machine)
            return

        def gradient_of(micro_batch: T) -> tuple[R, Sequence[Tensor | None]]:
            objective, found = forward(micro_batch)
            return found, torch.autograd.grad(-objective, alone, allow_unused=True)

        for first in range(0, len(micro_batches), self.threads):
            results = in_threads(
                [partial(gradient_of, micro_batch) for micro_batch in micro_batches[first : first + self.threads]]
            )
            # Added up in the order of the micro-batches: the sum does not depend on which thread is first.
            for found, gradients in results:
                for parameter, gradient in zip(alone, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                yield found
            del results, gradients, gradient  # The next packs have gradients of their own.


def same(actual: Tensor, expected: Tensor) -> bool:
    """True where two ways to compute hidden states differ by no more than rounding explains."""
    return torch.allclose(actual, expected, rtol=1e-2, atol=1e-2 if actual.dtype != torch.float32 else 1e-4)


def has_full_attention(config: PreTrainedConfig) -> bool:
    """True where every layer attends to the whole sequence: a window is longer than a trial could be."""
    config = config.get_text_config(decoder=True)
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return not windowed and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}


class UnmaskedRows(PaddedRows):
    """Padded rows for this package's attention, which needs no mask: it is causal."""

    def inputs(self, rollouts: Rollouts) -> dict[str, Any]:
        # To make its own mask, transformers would read the positions, which waits for a GPU.
        mask = rollouts.token_ids.new_zeros(1, 1, 1, 1)
        return PaddedRows.inputs(self, rollouts) | {"attention_mask": mask, "padded_rows": True}
