"""Rotary positions that depend on a sequence alone, and not on the sequences beside it."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

FIXED = "fixed"
"""A rope type that transformers does not know: with it rotary modules leave their frequencies as they are."""


def fix_frequencies(model: PreTrainedModel) -> None:
    """Fixes the rotary frequencies of `model` at those of sequences within its original length.

    With `longrope` and `dynamic`, transformers 5 takes other frequencies for a whole forward as soon as its longest
    sequence is longer than the original length: a row's log-probs would depend on the rows beside it, and on
    `max_tokens`. Completions would be sampled with one set of frequencies and scored with the other. Within the
    original length nothing changes.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        rope_type = getattr(module, "rope_type", None)
        if not any(name in str(rope_type) for name in ("dynamic", "longrope")):
            continue
        # Some models have a type for each kind of layer.
        module.rope_type = dict.fromkeys(rope_type, FIXED) if isinstance(rope_type, dict) else FIXED
        for name, frequencies in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                # A long sequence that went through before may have changed them.
                original = getattr(module, name.replace("inv_freq", "original_inv_freq"))
                frequencies.copy_(original.to(frequencies.device))


def context_length(config: PreTrainedConfig) -> int | None:
    """Returns the length of the longest sequence, prompt and completion together; None without a limit.

    With `longrope` it is the original length: longer sequences would change all frequencies.
    """
    names = ("max_position_embeddings", "max_seq_len")
    limits = [limit for name in names if (limit := getattr(config, name, None)) is not None][:1]
    if (original_length := longrope_length(config)) is not None:
        limits.append(original_length)
    return min(limits, default=None)


def longrope_length(config: PreTrainedConfig) -> int | None:
    """Returns the length above which `longrope` would change all frequencies; None with other types of positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have parameters for each kind of layer.
    parameters = [value for value in (rope, *rope.values()) if isinstance(value, dict)]
    lengths = [
        layer["original_max_position_embeddings"] for layer in parameters if layer.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)
