"""The common parts of transformers' models: trunk and head, what ends a completion, what is switched off."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.policy.rope import context_length
from grpo_lightning.types import UsageError, require


def stop_ids_of(
    generation_config: GenerationConfig | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Every token that ends a completion: those of the generation config, the model config and the tokenizer."""
    ids: set[int] = set()
    for owner in (generation_config, config, config.get_text_config(decoder=True), tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(ids)


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """The transformer below the head of `model`; that of the text alone, where it also sees or hears."""
    # A `PeftModel` has a base_model of its own: the adapter.
    model = getattr(model, "get_base_model", lambda: model)()
    composite = model.config.get_text_config(decoder=True) is not model.config
    trunk = model.get_decoder() if composite else model.base_model
    # Llama 4's text model has no base_model.
    return getattr(model, "model", model) if trunk is model else trunk


def cache_name(trunk: nn.Module) -> str:
    """The argument that takes the cache: `cache` since transformers 5.24, before it `past_key_values`, or Mamba's."""
    takes = inspect.signature(trunk.forward).parameters
    return next((name for name in ("cache_params", "cache") if name in takes), "past_key_values")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in eval mode: without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def forget_casts() -> None:
    """Lets autocast cast weights anew: within one context it keeps the casts of trained weights, by the tensor."""
    torch.clear_autocast_cache()


def freeze_all_but_text(model: PreTrainedModel) -> None:
    """Turns gradients off for weights that text never reaches, such as a vision tower."""
    reached = {id(p) for part in (trunk_of(model), model.get_output_embeddings()) if part for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in reached)


def recompute_activations(model: PreTrainedModel) -> None:
    """Turns gradient checkpointing on, by the name that the installed transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def remove_dropout(model: PreTrainedModel) -> None:
    """Sets every dropout probability and jitter of the model to 0, in its modules; dropout in its config too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            noise = "dropout" in name or name in ("layerdrop", "jitter_noise", "input_jitter_noise")
            if noise and isinstance(value, float):
                setattr(module, name, 0.0)
    for name, value in vars(model.config).items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(model.config, name, 0.0)


class Float32Linear(nn.Linear):
    """A linear layer that multiplies in float32, whatever the type of its weights, and under autocast."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def compute_head_in_float32(model: PreTrainedModel, key: str) -> None:
    """Makes the head of `model` a `Float32Linear` with the same weights; `key` is the setting that asks for it."""
    head, name = model.get_output_embeddings(), type(model).__name__
    require(type(head) is nn.Linear, f"{key}=true: the head of {name} is a {type(head).__name__}; leave it false")
    head.__class__ = Float32Linear


def head_dtype(layer: Any) -> torch.dtype:
    """The type that a head multiplies in: float32, that of autocast where it is on, or that of its weights."""
    if isinstance(layer, Float32Linear):
        return torch.float32
    device = layer.weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.weight.dtype


class Head:
    """The output embedding of a causal LM, and what its class does to the logits afterwards."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.embedding = model.get_output_embeddings()
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self._factor = getattr(config, "logit_scale", None) or 1.0
        self._divisor = getattr(config, "logits_scaling", None) or 1.0
        self.scale: float = self._factor / self._divisor  # the factor of the logits
        names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        self.soft_caps: list[float] = [cap for name in names if (cap := getattr(config, name, None)) is not None]
        """The bounds that the logits are squeezed into."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., V] float32 logits."""
        # Mamba's residuals are float32 whatever its weights.
        logits: Tensor = self.embedding(hidden.to(head_dtype(self.embedding))).float()
        if self.scale != 1:
            logits = logits * self._factor / self._divisor
        for cap in self.soft_caps:
            logits = torch.tanh(logits / cap) * cap
        return logits


@torch.no_grad()
def check_model(model: PreTrainedModel, path: str, has_dropout: bool) -> None:
    """Raises UsageError for a model that is not causal, or computes its logits in an unknown way, or noisily.

    The model's class may change the logits after the head. Both ways get the head's output in float32: so they agree
    to 1e-3, or differ for a reason, whatever the type of the weights. With `has_dropout` noise in training is wanted.
    """
    refusal, trunk, head = f"policy.path={path}: {type(model).__name__}", trunk_of(model), Head(model)
    # Two rows that differ only in their second half, as padding would.
    input_ids = torch.arange(1, 17, device=next(model.parameters()).device).repeat(2, 1) % head.vocab_size
    input_ids[1, 8:] = 0
    # The first of them beside copies of the second, which stand at the end of the context.
    positions = {}
    limit = context_length(model.config.get_text_config(decoder=True))
    if limit and "position_ids" in inspect.signature(trunk.forward).parameters:
        starts = torch.tensor([0, *[max(0, limit - 16)] * 3], device=input_ids.device)
        positions["position_ids"] = starts[:, None] + torch.arange(16, device=input_ids.device)

    def logits(input_ids: Tensor = input_ids, **kwargs: Tensor) -> Tensor:
        return head(trunk(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state)

    in_float32 = head.embedding.register_forward_hook(lambda module, args, output: output.float())
    try:
        with evaluating(model):
            expected = model(input_ids=input_ids, use_cache=False).logits.float()
            actual = logits()
            crowded = logits(input_ids[[0, 1, 1, 1]], **positions)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(
            f"{refusal} does not work as a causal LM of text ({first_line(error)}); use another model"
        ) from error
    finally:
        in_float32.remove()
    if not torch.allclose(expected[0, :8], expected[1, :8], rtol=2e-2, atol=2e-2):
        raise UsageError(f"{refusal} is not causal, its logits depend on later tokens; use another model")
    if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3):
        raise UsageError(
            f"{refusal} changes its logits after the output embedding in a way grpo_lightning does not know; use "
            "another model, and please report it"
        )
    if not torch.allclose(crowded[0], actual[0], rtol=2e-2, atol=2e-2):
        raise UsageError(
            f"{refusal} computes a sequence otherwise beside others or longer ones, so its log-probs would depend on "
            "what goes through it together; use another model"
        )
    if has_dropout:
        return
    model.train()
    with torch.random.fork_rng([input_ids.device] if input_ids.device.type == "cuda" else []):
        in_training = logits()
    model.eval()
    if not torch.allclose(in_training, actual, rtol=2e-2, atol=2e-2):
        raise UsageError(
            f"{refusal} computes something else in training, so the first ratio would not be 1; use another model, "
            "or policy.dropout=true to train with its noise"
        )
