"""Bytes of the key-value cache of decoding, and bytes of free memory."""

import math
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig

from grpo_lightning import ranks

GIB = 2**30

CUDA_FRACTION = 0.8
"""Fraction of a GPU's free memory to use. The rest is for activations of the prefill, and for fragmentation."""
CPU_FRACTION = 0.5
"""Fraction of a machine's available memory to use. Other programs need memory, too."""
LOGITS_COPIES = 4
"""Number of float32 tensors [rows, V] that are held at once while a token is sampled."""
READ_TOKENS = 2**14
"""Most tokens of prompts, padding included, that are read at once. They keep a GPU busy."""


def cache_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of the key-value cache per token of a row, over all layers.

    `dtype` is autocast's type where autocast is on, else the type of the weights.
    """
    config = config.get_text_config(decoder=True)
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    return sum(_numbers_per_token(layer) for layer in layers) * dtype.itemsize


def _numbers_per_token(layer: Any) -> int:
    """Returns the elements of keys and values per token in one layer."""
    query_heads = layer.num_attention_heads
    latent = getattr(layer, "kv_lora_rank", None)
    # Multi-head latent attention caches the vector from which it computes keys and values.
    if latent is not None:
        return latent + layer.qk_rope_head_dim
    size = getattr(layer, "head_dim", None) or layer.hidden_size // query_heads
    heads = getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_kv_heads", None) or query_heads
    if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
        heads = 1
    return heads * (size + (getattr(layer, "v_head_dim", None) or size))


def row_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Returns the bytes per decoded row, for its cache and its logits."""
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return cache_bytes_per_token(config, dtype) * tokens + LOGITS_COPIES * vocabulary * torch.float32.itemsize


def read_at_once(config: PreTrainedConfig, dtype: torch.dtype, memory: int) -> int:
    """Returns the tokens of prompts to read at once. Their activations take at most about a quarter of the cache."""
    config = config.get_text_config(decoder=True)
    mlp_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    # Gate, up and their product, beside the states; Gemma 3n has a size per layer.
    num_elements = 3 * (max(mlp_size) if isinstance(mlp_size, list) else mlp_size) + 8 * config.hidden_size
    return max(1, min(READ_TOKENS, memory // (4 * num_elements * dtype.itemsize)))


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that decoding may take on `device`: a fraction of the memory that is free now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(CUDA_FRACTION * (free + cached))
    return int(CPU_FRACTION * available_bytes()) // ranks.world_size()


def available_bytes() -> int:
    """Returns the bytes of main memory available without swapping, on this machine or in its container."""
    return int(min(psutil.virtual_memory().available, in_cgroup(Path("/sys/fs/cgroup"))))


def in_cgroup(folder: Path) -> float:
    """Returns the bytes that a container may still take, cached files included; infinite if unknown or unlimited."""
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(cached["inactive_file"]))
    except (OSError, KeyError, ValueError):
        return math.inf
