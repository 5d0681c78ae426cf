"""The memory that a forward and a backward of a policy need, found by running them on tensors without numbers.

Fake tensors have shapes and types but no memory, so a plan costs neither weights nor a device. Every operation is the
real one, of the real policy: attention, autocast, recomputed layers and the chunks of the head need no formulas of
their own here.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy import shared_prefix
from grpo_lightning.policy.adapter import LoRA
from grpo_lightning.policy.fused_layers import fuse
from grpo_lightning.policy.offloading import InMainMemory
from grpo_lightning.policy.policy import Policy, recompute_activations, remove_dropout, trunk_of
from grpo_lightning.policy.token_logp import logits_at_once
from grpo_lightning.training.internals import FAKE_TENSOR_LOGGER, FakeTensorMode, TorchDispatchMode, tree_leaves

# It writes a stack trace for every operation that it cannot run; the exception is enough.
logging.getLogger(FAKE_TENSOR_LOGGER).setLevel(logging.CRITICAL)

DEPTHS = (2, 3)
"""Numbers of layers that are run where all layers are alike; the bytes of the others follow from the difference."""


@dataclass(frozen=True)
class Held:
    """Bytes held at once: in the transformer, and by the head with what follows it."""

    activations: float = 0
    logits: float = 0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.activations + self.logits

    def __add__(self, other: "Held") -> "Held":
        return Held(self.activations + other.activations, self.logits + other.logits)

    def __sub__(self, other: "Held") -> "Held":
        return Held(self.activations - other.activations, self.logits - other.logits)

    def __mul__(self, factor: float) -> "Held":
        return Held(self.activations * factor, self.logits * factor)


def most(*held: Held) -> Held:
    """The one with the largest total."""
    return max(held, key=lambda one: one.total)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were made under it; views and `known` tensors cost nothing."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.in_head = False
        self.live = Held()
        self.peaks = [Held()]
        """The largest total so far, one for each section begun by `begin_section`."""
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)
        self._inside = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Fake tensors work out their shapes by operations on tensors of their own.
        if self._inside:
            return func(*args, **(kwargs or {}))
        self._inside = True
        try:
            made = func(*args, **(kwargs or {}))
        finally:
            self._inside = False
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = Held(logits=storage.nbytes()) if self.in_head else Held(activations=storage.nbytes())
        self._change(size)
        weakref.finalize(storage, self._change, size * -1)

    def _change(self, size: Held) -> None:
        self.live += size
        self.peaks[-1] = most(self.peaks[-1], self.live)

    def begin_section(self) -> None:
        """Lets a new peak begin."""
        self.peaks.append(self.live)


class Nowhere(InMainMemory):
    """Keeps the shapes of what would be in main memory, which is not the device's."""

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """True: the twin has a single device."""
        return True

    def take(self, tensor: Tensor) -> Any:
        """The shape, and an empty tensor that knows the type."""
        return tensor.new_empty(0), tensor.shape

    def give_back(self, device: torch.device, copy: Any) -> Tensor:
        """A tensor without numbers, as any of the twin."""
        empty, shape = copy
        return empty.new_empty(shape)


class Twin:
    """A policy of the same shape without numbers, of a few layers or all.

    Args:
        config: The configuration of the model.
        dtype: Type of the weights.
        attention: The implementation of the passes: transformers' name for it.
        shares_prefix: Whether a group's prompt goes through the model once.
        recomputes: Whether activations are recomputed (gradient checkpointing).
        dropout: Whether the model keeps its dropout.
        autocast: The type that arithmetic is done in, or None for that of the weights.
        trust_remote_code: Run Python code shipped with the model.
        adapter: What is trained in place of the weights.
        offloads: Whether activations are kept in main memory, and that is not the device's.
        fused: Whether the policy's `fused` is on.
        device: Type of the device whose memory this is about.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        attention: str,
        shares_prefix: bool,
        recomputes: bool,
        dropout: bool,
        autocast: torch.dtype | None,
        trust_remote_code: bool = False,
        adapter: LoRA | None = None,
        offloads: bool = False,
        fused: bool = True,
        device: str = "cpu",
    ) -> None:
        # flash_attention_2 cannot be loaded without a GPU; it holds what sdpa's fused kernels hold.
        implementation = shared_prefix.ATTENTION if shares_prefix or attention.startswith("flash") else attention
        self.autocast = autocast
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.model = self._model(config, dtype, implementation, trust_remote_code)
        if not dropout:
            remove_dropout(self.model)
        if adapter is not None:
            self._adapt(adapter)
        if fused:
            fuse(self.model)
        if recomputes:
            recompute_activations(self.model)
        self.policy = Policy("", gradient_checkpointing=recomputes, fused=fused)
        self.policy.logits_at_once = logits_at_once(device)
        self.policy.config = self.model.config
        self.policy.model = self.model
        self.policy.shares_prefix = shares_prefix
        if offloads:
            self.policy.kept = Nowhere
        self._live = LiveBytes()
        self._wrap()

    def _model(
        self, config: PreTrainedConfig, dtype: torch.dtype, attention: str, trust_remote_code: bool
    ) -> PreTrainedModel:
        try:
            with self.mode:
                return AutoModelForCausalLM.from_config(
                    copy.deepcopy(config),
                    dtype=dtype,
                    attn_implementation=attention,
                    trust_remote_code=trust_remote_code,
                )
        except ValueError:
            # As the policy does where a model lacks sdpa.
            if attention == "eager":
                raise
            return self._model(config, dtype, "eager", trust_remote_code)

    def _adapt(self, adapter: LoRA) -> None:
        """Adds the adapter, and takes the numbers out of it: PEFT cannot move tensors that have none."""
        with torch.no_grad():
            adapter.add(self.model)
        with self.mode:
            for module in self.model.modules():
                for name, parameter in [*module.named_parameters(recurse=False)]:
                    if parameter.requires_grad:
                        setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))

    def _wrap(self) -> None:
        """Tells transformer and head apart, and makes tensors that the transformer creates itself fake too."""
        base, layers = trunk_of(self.model), layers_of(self.model)
        forward = base.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._live.in_head = False
            with self.mode, self._live:
                outputs = forward(*args, **kwargs)
            hidden = outputs.last_hidden_state
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: setattr(self._live, "in_head", False))
            self._live.in_head = True
            return outputs

        def bottom(layer: Any, args: Any, kwargs: Any) -> None:
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._live.begin_section())

        base.forward = wrapped
        if len(layers) > 1:
            # Behind the backward of the second layer, the first and the embedding are left: the same at any depth.
            layers[1].register_forward_pre_hook(bottom, with_kwargs=True)

    @contextmanager
    def _running(self, gradients: bool) -> Iterator[LiveBytes]:
        """Counts the tensors that are made inside; the gradients of earlier packs exist already."""
        self.model.train(gradients)
        with self.mode:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if gradients and parameter.requires_grad else None
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self._live = LiveBytes([*self.model.parameters(), *self.model.buffers(), *grads])
        autocast: AbstractContextManager[Any] = (
            nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)
        )
        with self._live, autocast, torch.set_grad_enabled(gradients):
            yield self._live

    def update(self, pack: Rollouts, entropy_gradient: bool = False) -> list[Held]:
        """A pack's forward and backward: the peak to the backward of the second layer, and that behind it."""
        with self._running(gradients=True) as live, fresh_layout(pack):
            scored = self.policy(pack, entropy_gradient)
            (scored.logp + scored.entropy).sum().backward()
            del scored
        return [most(*live.peaks[:1]), most(*live.peaks[1:])] if len(live.peaks) > 1 else [live.peaks[0]] * 2

    def score(self, pack: Rollouts) -> list[Held]:
        """A pack's forward without gradients."""
        with self._running(gradients=False) as live, fresh_layout(pack):
            self.policy(pack)
        return live.peaks

    def prefill(self, num_prompts: int, width: int) -> list[Held]:
        """The prompts' forward, its cache not kept."""
        with self._running(gradients=False) as live:
            self.policy.hidden(torch.zeros(num_prompts, width, dtype=torch.int64), use_cache=False)
        return live.peaks

    def draw(self, num_rows: int, sampling: Sampling) -> list[Held]:
        """One token drawn for each row."""
        with self._running(gradients=False) as live:
            live.in_head = True
            with self.mode, live:
                weight = self.model.get_output_embeddings().weight
                hidden = torch.zeros(num_rows, weight.shape[1], dtype=weight.dtype)
                draw(self.policy.logits(hidden), torch.zeros(num_rows), sampling)
                del hidden
        return live.peaks


@contextmanager
def fresh_layout(pack: Rollouts) -> Iterator[None]:
    """Drops the layout of the pack before and after: its masks are tensors of the run that made them."""
    pack.layout = None
    try:
        yield
    finally:
        pack.layout = None


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The model's layers, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def layers_are_alike(model: PreTrainedModel) -> bool:
    """Whether all layers hold as much, so that a few layers suffice."""
    layers, text = layers_of(model), model.config.get_text_config(decoder=True)
    shapes = [[parameter.shape for parameter in layer.parameters()] for layer in layers]
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    return (
        len(layers) == text.num_hidden_layers > max(DEPTHS)
        and all(shape == shapes[0] for shape in shapes)
        and len(set(kinds)) == 1
    )


def of_depth(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """The config of the same model with only its first layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    return config
