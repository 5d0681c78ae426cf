"""The parts that transformers' models share: trunk, head and stop tokens; dropout off; the check of a model."""

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
from grpo_lightning.types import UsageError


def stop_ids_of(
    generation_config: GenerationConfig | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Returns every token that ends a completion, by the generation config, the model config or the tokenizer."""
    ids: set[int] = set()
    for owner in (generation_config, config, config.get_text_config(decoder=True), tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(ids)


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """Returns the transformer below the head of `model`; only the text's, if the model also sees or hears."""
    # In a `PeftModel` base_model is the adapter.
    model = getattr(model, "get_base_model", lambda: model)()
    is_composite = model.config.get_text_config(decoder=True) is not model.config
    trunk = model.get_decoder() if is_composite else model.base_model
    # Llama 4's text model has no base_model.
    return getattr(model, "model", model) if trunk is model else trunk


def cache_name(trunk: nn.Module) -> str:
    """Returns the name of the cache argument: Mamba's, `cache` since transformers 5.24, before `past_key_values`."""
    parameters = inspect.signature(trunk.forward).parameters
    return next((name for name in ("cache_params", "cache") if name in parameters), "past_key_values")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Opens a context in which the model is in eval mode: without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def forget_casts() -> None:
    """Makes autocast cast weights again: within a context it caches the casts of trained weights, by the tensor."""
    torch.clear_autocast_cache()


def encoder_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Returns the weights that text never reaches, such as those of an image encoder."""
    modules = (trunk_of(model), model.get_output_embeddings())
    text_ids = {id(parameter) for module in modules if module for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in text_ids]


def recompute_activations(model: PreTrainedModel) -> None:
    """Turns gradient checkpointing on, by its name in the installed transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def remove_dropout(model: PreTrainedModel) -> None:
    """Sets every dropout probability and jitter of the model's modules to 0, and dropout in its config."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            is_noise = "dropout" in name or name in ("layerdrop", "jitter_noise", "input_jitter_noise")
            if is_noise and isinstance(value, float):
                setattr(module, name, 0.0)
    for name, value in vars(model.config).items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(model.config, name, 0.0)


class Float32Linear(nn.Linear):
    """A linear layer that multiplies in float32, with weights of any type, under autocast too."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def compute_head_in_float32(model: PreTrainedModel, key: str) -> None:
    """Makes the head of `model` a `Float32Linear` with the same weights, for the setting `key`."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UsageError(f"{key}=true: the head of {type(model).__name__} is a {type(head).__name__}; leave it false")
    head.__class__ = Float32Linear


def head_dtype(layer: Any) -> torch.dtype:
    """Returns the compute dtype of a head: float32, autocast's where it is on, or the dtype of the weights."""
    if isinstance(layer, Float32Linear):
        return torch.float32
    device = layer.weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.weight.dtype


class Head:
    """The output embedding of a causal LM, and the scale and soft caps that its class applies to the logits.

    Args:
        model: The causal LM.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.embedding = model.get_output_embeddings()
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self._factor = getattr(config, "logit_scale", None) or 1.0
        self._divisor = getattr(config, "logits_scaling", None) or 1.0
        self.scale: float = self._factor / self._divisor
        """The factor of the logits."""
        names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        self.soft_caps: list[float] = [cap for name in names if (cap := getattr(config, name, None)) is not None]
        """The bounds into which tanh squeezes the logits, one after another."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., V] float32 logits."""
        # Mamba's residuals are float32 with weights of any type.
        logits: Tensor = self.embedding(hidden.to(head_dtype(self.embedding))).float()
        if self.scale != 1:
            logits = logits * self._factor / self._divisor
        for cap in self.soft_caps:
            logits = torch.tanh(logits / cap) * cap
        return logits


@torch.no_grad()
def check_model(model: PreTrainedModel, path: str, has_dropout: bool) -> None:
    """Raises UsageError for a model that is not causal, or computes its logits in an unknown way, or noisily.

    The logits of the model's class, which may change them after the head, are compared with the logits of `Head`. Both
    get the head's output in float32: with weights of any type they agree to 1e-3, or differ for a reason.

    Args:
        model: The causal LM, in eval mode.
        path: Its path or hub id, for messages.
        has_dropout: Allow noise in training.
    """
    refusal = f"policy.path={path}: {type(model).__name__}"
    trunk = trunk_of(model)
    head = Head(model)

    # Two rows that differ only in their second half, as padding would.
    input_ids = torch.arange(1, 17, device=next(model.parameters()).device).repeat(2, 1) % head.vocab_size
    input_ids[1, 8:] = 0
    # The first row again, beside copies of the second row that stand at the end of the context.
    positions = {}
    limit = context_length(model.config.get_text_config(decoder=True))
    if limit and "position_ids" in inspect.signature(trunk.forward).parameters:
        starts = torch.tensor([0, *[max(0, limit - 16)] * 3], device=input_ids.device)
        positions["position_ids"] = starts[:, None] + torch.arange(16, device=input_ids.device)

    def logits(input_ids: Tensor = input_ids, **kwargs: Tensor) -> Tensor:
        return head(trunk(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state)

    # The head's output is float32 in both ways, and a failure in either is the model's.
    hook = head.embedding.register_forward_hook(lambda module, args, output: output.float())
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
        hook.remove()

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

    # Without dropout the model in training mode computes the same.
    model.train()
    with torch.random.fork_rng([input_ids.device] if input_ids.device.type == "cuda" else []):
        training_logits = logits()
    model.eval()
    if not torch.allclose(training_logits, actual, rtol=2e-2, atol=2e-2):
        raise UsageError(
            f"{refusal} computes something else in training, so the first ratio would not be 1; use another model, "
            "or policy.dropout=true to train with its noise"
        )
