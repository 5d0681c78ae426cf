"""How much arithmetic a step's updates take, and how much the device could do at most: what `perf/` is made of."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.adapter import num_elements
from grpo_lightning.policy.policy import Policy

PEAKS = {
    "GB200": (2500e12, 1250e12, 80e12),
    "B200": (2250e12, 1125e12, 75e12),
    "GH200": (989e12, 494e12, 67e12),
    "H200": (989e12, 494e12, 67e12),
    "H100 PCIe": (756e12, 378e12, 51e12),
    "H100 NVL": (835e12, 417e12, 60e12),
    "H100": (989e12, 494e12, 67e12),
    "H800": (989e12, 494e12, 67e12),
    "A100": (312e12, 156e12, 19.5e12),
    "A800": (312e12, 156e12, 19.5e12),
    "A40": (149.7e12, 74.8e12, 37.4e12),
    "A30": (165e12, 82e12, 10.3e12),
    "A10": (125e12, 62.5e12, 31.2e12),
    "A10G": (70e12, 35e12, 31.5e12),
    "A6000": (154.8e12, 77.4e12, 38.7e12),
    "L40S": (362e12, 183e12, 91.6e12),
    "L40": (181e12, 90.5e12, 90.5e12),
    "L4": (121e12, 60e12, 30.3e12),
    "RTX 6000 Ada": (364e12, 182e12, 91.1e12),
    "RTX 5090": (209.5e12, 104.8e12, 104.8e12),
    "RTX 4090": (165.2e12, 82.6e12, 82.6e12),
    "RTX 3090 Ti": (80e12, 40e12, 40e12),
    "RTX 3090": (71e12, 35.6e12, 35.6e12),
}
"""Floating-point operations per second of dense products, from NVIDIA's data sheets and architecture papers.

By a part of the device's name, the first that fits: in bfloat16 (float16 is as fast), in TF32, and in float32."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations of transformers call the number of a layer's experts."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a token costs in forward and backward, in floating-point operations.

    A weight takes 2 in the forward, 2 in the gradient of its input and, if it is trained, 2 in its own: 6 in all.
    Attention takes 12 x layers x heads x head size per token of the sequence. Recomputed activations do not count.

    Source: PaLM (arXiv 2204.02311), appendix B: 6N + 12LHQT per token. N is here without the input embedding, which
    multiplies nothing, and the head counts only where log-probs are taken.
    """

    token: float
    """Of the transformer below the head, attention aside."""
    drawn: float
    """Of the head."""
    pair: float
    """Of attention: per token, and per token of its sequence."""

    @classmethod
    def from_policy(cls, policy: Policy) -> "Cost | None":
        """The cost for a policy; None for a mixture of experts, of whose weights a token uses a part."""
        return cls.from_model(policy.model)

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "Cost | None":
        """The cost for a model, whose weights may be on the meta device; None for a mixture of experts."""
        config = model.config.get_text_config(decoder=True)
        if any(getattr(config, name, None) for name in EXPERTS):
            return None
        tables = {id(p) for e in (model.get_input_embeddings(), model.get_output_embeddings()) for p in weights(e)}
        heads = getattr(config, "num_attention_heads", 0) or 0
        size = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        return cls(
            token=operations(p for p in model.parameters() if id(p) not in tables),
            drawn=operations(weights(model.get_output_embeddings())),
            pair=12.0 * config.num_hidden_layers * heads * size,
        )

    def of(self, pack: Rollouts, shares_prefix: bool) -> float:
        """Operations of one forward and backward over a pack."""
        sizes = pack.sizes
        prompts = sizes.prompt_lengths if shares_prefix else sizes.prompt_lengths[sizes.group]
        completions = sizes.completion_lengths
        tokens = int(prompts.sum() + completions.sum())
        pairs = int(prompts.square().sum() + (completions * sizes.sequence_lengths).sum())
        return self.token * tokens + self.drawn * pack.num_tokens + self.pair * pairs


def weights(module: torch.nn.Module | None) -> list[torch.nn.Parameter]:
    """The parameters of a module that may not be there."""
    return [] if module is None else [*module.parameters()]


def operations(parameters: Iterable[torch.nn.Parameter]) -> float:
    """Floating-point operations of these weights for a token's forward and backward."""
    return float(sum((6 if p.requires_grad else 4) * num_elements(p) for p in parameters))


@dataclass(frozen=True, slots=True)
class Work:
    """What the updates of a step did on this rank."""

    tokens: int = 0
    """Drawn tokens that were learned from, once per pass."""
    operations: float = 0.0
    """Floating-point operations; 0 where they are not known."""
    peak: float = 0.0
    """Those that the device could do at most in a second; 0 where that is not known."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.operations + other.operations, self.peak + other.peak)

    @classmethod
    def of_updates(cls, packs: Sequence[Sequence[Rollouts]], num_updates: int, policy: Policy, peak: float) -> "Work":
        """The work of the first `num_updates` of the passes over a step's minibatches.

        Args:
            packs: Those of each minibatch.
            num_updates: Forwards and backwards that were made.
            policy: It was learning.
            peak: Of the device; 0 if it is not known.
        """
        cost = Cost.from_policy(policy) if peak else None
        tokens, operations = 0, 0.0
        for index, minibatch in enumerate(packs):
            times = len(range(index, num_updates, len(packs)))
            tokens += times * sum(pack.num_tokens for pack in minibatch)
            operations += times * sum(cost.of(pack, policy.shares_prefix) for pack in minibatch) if cost else 0.0
        return cls(tokens, operations, peak)


def peak_operations(name: str, dtype: torch.dtype, tf32: bool) -> float:
    """Floating-point operations per second that a device could do at most; 0 if it is not in PEAKS.

    Args:
        name: The device's, as `torch.cuda.get_device_name` has it.
        dtype: Type of the products.
        tf32: Whether float32 is rounded to TF32 in products.
    """
    # A laptop's chip has the name of a larger one.
    fits = (peaks for chip, peaks in PEAKS.items() if re.search(rf"\b{chip}\b", name) and "Laptop" not in name)
    half, tensor, single = next(fits, (0.0, 0.0, 0.0))
    return half if dtype != torch.float32 else tensor if tf32 else single


def peak_of(device: torch.device, dtype: torch.dtype) -> float:
    """That of a device of this machine; 0 for a CPU."""
    if device.type != "cuda":
        return 0.0
    return peak_operations(torch.cuda.get_device_name(device), dtype, torch.get_float32_matmul_precision() != "highest")
