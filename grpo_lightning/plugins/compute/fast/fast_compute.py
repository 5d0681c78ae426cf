"""The fast `Compute`: the same log-probs in less time and memory."""

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
        fused: Compute log-probs and entropies in one pass over the vocabulary with a hand-written backward, where the
            head is a plain linear layer; norms and gated MLPs of Llama's form in fewer passes. It changes only speed,
            memory and rounding.
        products: Library that multiplies float32 matrices on a CPU. `torch` is the library that torch was built with,
            `onednn` is about twice as fast on AMD's processors with AVX-512, and `auto` is oneDNN on AMD and torch's
            library elsewhere. It changes only speed and rounding.
        threads: Number of micro-batches that an update passes at once on a CPU, each in a thread with an equal part of
            the cores. More than 1 is faster for small models, whose products are too small to be divided among cores,
            and takes as many times the memory of a micro-batch. It changes only speed, memory and rounding.
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
        """Elements of the blocks that fused log-probs are computed in; None for as many as suit the device."""

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
        """Tries what the model allows, as `Compute.adapt`, and whether prompts may be shared.

        A model that computes the same with this package's attention keeps it, with or without shared prompts.
        """
        super().adapt(model, trunk)
        if model.config._attn_implementation != "sdpa":
            return
        trial = TRIAL.to(next(model.parameters()).device)
        attends = shares = is_causal = False
        with evaluating(model):
            expected = self.hidden(trunk, trial, PaddedRows.from_rollouts(trial))
            try:
                model.set_attn_implementation(shared_prefix.ATTENTION)
                attends = is_close(self.hidden(trunk, trial, PaddedRows.from_rollouts(trial)), expected)
                if attends and has_full_attention(model.config):
                    shares = is_close(self.hidden(trunk, trial, SharedPrefix.from_rollouts(trial)), expected)
                    is_causal = is_close(self.hidden(trunk, trial, UnmaskedRows.from_rollouts(trial)), expected)
            except Exception as error:  # A model that fails with another attention keeps its own.
                log.debug("%s keeps transformers' attention: %s", type(model).__name__, error)
            finally:
                if not attends:
                    model.set_attn_implementation("sdpa")
        self.needs_mask = not is_causal
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
        parameters = machine.alone() if self.threads > 1 else None
        if parameters is None:
            yield from super().gradients(micro_batches, forward, machine)
            return

        def gradient_of(micro_batch: T) -> tuple[R, Sequence[Tensor | None]]:
            objective, result = forward(micro_batch)
            return result, torch.autograd.grad(-objective, parameters, allow_unused=True)

        for start in range(0, len(micro_batches), self.threads):
            at_once = micro_batches[start : start + self.threads]
            results = in_threads([partial(gradient_of, micro_batch) for micro_batch in at_once])
            # Added up in the order of the micro-batches: the sum does not depend on which thread ends first.
            for result, gradients in results:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                yield result
            # Freed before the next micro-batches make theirs.
            del results, gradients, gradient


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether two ways to compute hidden states differ by rounding at most."""
    return torch.allclose(actual, expected, rtol=1e-2, atol=1e-2 if actual.dtype != torch.float32 else 1e-4)


def has_full_attention(config: PreTrainedConfig) -> bool:
    """Returns whether every layer attends to the whole sequence; a trial is too short to show a window."""
    config = config.get_text_config(decoder=True)
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return not has_window and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}


class UnmaskedRows(PaddedRows):
    """Padded rows for this package's attention, which is causal and needs no mask."""

    def inputs(self, rollouts: Rollouts) -> dict[str, Any]:
        # Without a mask transformers would make one from the positions, and wait for the GPU to read them.
        mask = rollouts.token_ids.new_zeros(1, 1, 1, 1)
        return PaddedRows.inputs(self, rollouts) | {"attention_mask": mask, "padded_rows": True}
