"""How much arithmetic a step's updates take, and how much the device could do at most: `perf/mfu`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedModel

from grpo_lightning import ranks
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.grpo.step import Observer, Pack, Step
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.adapter import num_elements
from grpo_lightning.policy.policy import Policy

PEAKS = {
    "GB200": (2500e12, 1250e12, 80e12),
    "B200": (2250e12, 1125e12, 75e12),
    "H100 PCIe": (756e12, 378e12, 51e12),
    "H100 NVL": (835e12, 417e12, 60e12),
    "GH200|H200|H100|H800": (989e12, 494e12, 67e12),
    "A100|A800": (312e12, 156e12, 19.5e12),
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
    def from_model(cls, model: PreTrainedModel) -> "Cost | None":
        """The cost for a model, also on the meta device; None for a mixture of experts: a token uses a part."""
        config = model.config.get_text_config(decoder=True)
        if any(getattr(config, name, None) for name in EXPERTS):
            return None
        head = model.get_output_embeddings()
        tables = {id(p) for e in (model.get_input_embeddings(), head) for p in ([] if e is None else e.parameters())}
        heads = getattr(config, "num_attention_heads", 0) or 0
        size = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        return cls(
            token=operations(p for p in model.parameters() if id(p) not in tables),
            drawn=operations([] if head is None else head.parameters()),
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


def operations(parameters: Iterable[torch.nn.Parameter]) -> float:
    """Floating-point operations of these weights for a token's forward and backward."""
    return float(sum((6 if p.requires_grad else 4) * num_elements(p) for p in parameters))


def operations_of(packs: Sequence[Sequence[Pack]], num_updates: int, policy: Policy) -> float:
    """Floating-point operations of the first `num_updates` updates over a step's minibatches; 0 if not known.

    `packs` are those of each minibatch, while the policy was learning.
    """
    cost, shares = Cost.from_model(policy.model), policy.compute.shares_prefix
    if cost is None:
        return 0.0
    each = [sum(cost.of(pack.rollouts, shares) for pack in minibatch) for minibatch in packs]
    return sum(each[update % len(each)] for update in range(num_updates))


class Utilisation(Callback, Observer):
    """Logs `perf/mfu`: how much of the devices' arithmetic a step's updates used, where their peak is known."""

    def __init__(self) -> None:
        self._module: Any = None
        self._peak = self._peak_of_all = self._operations = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Looks up what the devices can do."""
        self._module = pl_module
        with trainer.strategy.precision_plugin.forward_context():
            self._peak = peak_of(pl_module.device, compute_dtype(self._module.policy))
        self._peak_of_all = sum(ranks.gather(self._peak))

    def updated(self, step: Step) -> None:
        """Counts, while the packs are there."""
        if self._peak:
            self._operations = operations_of(step.packs, len(step.passes.updates), self._module.policy)

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Logs the fraction, over all ranks."""
        if self._peak_of_all and (operations := sum(ranks.gather(self._operations))):
            fraction = operations / (metrics["time/optimise"] * self._peak_of_all)
            self._module.log("perf/mfu", torch.tensor(fraction))


def peak_operations(name: str, dtype: torch.dtype, tf32: bool) -> float:
    """Floating-point operations per second that the device of this name could do at most; 0 if it is not in PEAKS.

    With `tf32`, products round float32 to TF32.
    """
    # A laptop's chip has the name of a larger one.
    fits = (peaks for chip, peaks in PEAKS.items() if re.search(rf"\b({chip})\b", name) and "Laptop" not in name)
    half, tensor, single = next(fits, (0.0, 0.0, 0.0))
    return half if dtype != torch.float32 else tensor if tf32 else single


def peak_of(device: torch.device, dtype: torch.dtype) -> float:
    """The peak of a device of this machine; 0 for a CPU."""
    if device.type != "cuda":
        return 0.0
    return peak_operations(torch.cuda.get_device_name(device), dtype, torch.get_float32_matmul_precision() != "highest")
