"""Rotary positions that depend on a sequence alone, whatever else goes through the model with it."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

FIXED = "fixed"
"""No type of transformers: its rotary modules then leave their frequencies as they are."""


def fix_frequencies(model: PreTrainedModel) -> None:
    """Fixes the rotary frequencies of `model` at those of sequences within its original length.

    With `longrope` and `dynamic`, transformers 5 takes other frequencies for a whole forward as soon as its longest
    sequence is longer than that: a row's log-probs would depend on the rows beside it, and on `max_tokens`. Completions
    would be sampled with the one set and scored with the other. Within the original length nothing changes.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _switches(rope_type):
            module.rope_type = FIXED
            _restore_frequencies(module, "")
        elif isinstance(rope_type, dict):
            for layer_type in [key for key, value in rope_type.items() if _switches(value)]:
                module.rope_type = module.rope_type | {layer_type: FIXED}
                _restore_frequencies(module, f"{layer_type}_")


def _restore_frequencies(module: Any, prefix: str) -> None:
    """A long forward before may have changed them."""
    frequencies = getattr(module, f"{prefix}inv_freq")
    frequencies.copy_(getattr(module, f"{prefix}original_inv_freq").to(frequencies.device))


def context_length(config: PreTrainedConfig) -> int | None:
    """The longest sequence, prompt and completion together; None if the model sets no limit.

    With `longrope` it is the original length, up to which the frequencies are those of short sequences.
    """
    names = ("max_position_embeddings", "max_seq_len")
    limits = [limit for name in names if (limit := getattr(config, name, None)) is not None][:1]
    if (switch := longrope_length(config)) is not None:
        limits.append(switch)
    return min(limits, default=None)


def longrope_length(config: PreTrainedConfig) -> int | None:
    """The length above which `longrope` would change all frequencies; None with other types of positions."""
    lengths = []
    for parameters in _rope_parameters(config):
        length = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if parameters.get("rope_type", parameters.get("type")) == "longrope" and length is not None:
            lengths.append(int(length))
    return min(lengths, default=None)


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The parameters of the rotary positions; of each type of layer, where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def _switches(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"
