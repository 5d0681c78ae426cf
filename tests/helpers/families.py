"""Tiny random models of the causal architectures that transformers ships."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from helpers.tiny import STOP_IDS, randomised, tokenizer

BY_SIZE = {
    1: "topk_group first_k_dense_replace mamba_n_groups",
    2: "num_hidden_layers n_layer num_layers n_layers num_key_value_heads num_experts_per_tok n_group",
    4: (
        "num_attention_heads n_head n_heads num_heads attention_heads num_experts num_local_experts "
        "n_routed_experts rotary_dim mamba_n_heads time_step_rank mamba_dt_rank"
    ),
    8: (
        "head_dim attention_head_dim qk_nope_head_dim qk_rope_head_dim query_pre_attn_scalar state_size "
        "mamba_d_state attention_window_size sliding_window hidden_size_per_layer_input"
    ),
    12: "v_head_dim",
    16: (
        "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_d_head "
        "mamba_chunk_size chunk_size"
    ),
    32: "hidden_size n_embd d_model word_embed_proj_dim lru_width",
    48: "intermediate_size ffn_dim n_inner",
    64: "vocab_size max_position_embeddings n_positions max_seq_len mamba_d_ssm vocab_size_per_layer_input",
}
SIZES: dict[str, Any] = {key: size for size, keys in BY_SIZE.items() for key in keys.split()}
"""Keys of configs, each set where a model has it."""


MLA = {"head_dim": None, "num_key_value_heads": 4}
"""Multi-head latent attention has head sizes of its own."""

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    name: {}
    for name in (  # noqa: SIM905
        "afmoe apertus arcee aria_text biogpt bitnet bloom codegen cohere cohere2 cwm diffllama doge "
        "ernie4_5 ernie4_5_moe exaone4 falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe "
        "gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe "
        "granitemoeshared helium jetmoe llama llama4_text mamba minimax mistral mixtral "
        "modernbert-decoder mpt nanochat olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 "
        "qwen2_moe qwen3 qwen3_moe rwkv seed_oss smollm3 stablelm starcoder2 vaultgemma "
        "xglm"
    ).split()
} | {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": MLA | {"num_experts_per_tok": 2},
    "deepseek_v3": MLA,
    "dots1": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_local_experts": 4,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "falcon": {"head_dim": None},
    "falcon (alibi)": {"head_dim": None, "alibi": True},
    "falcon (new decoder)": {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "gemma3": {"text_config": {}, "vision_config": VISION | {"image_size": 16, "patch_size": 8}},
    "glm4_moe_lite": MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "mamba2": {"head_dim": 8, "num_heads": 8, "n_groups": 2},
    "minicpm3": MLA,
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen2 (window)": {"use_sliding_window": True, "max_window_layers": 1},
    "bert": {},
    "cpmant": {},
}
"""Model types, perhaps with a remark, and what their configs need besides SIZES; None takes a size away."""


def tiny_config(family: str) -> PreTrainedConfig:
    """A configuration of that family, as small as it will go."""
    model_type, overrides = family.split(" ")[0], dict(FAMILIES[family])
    if "text_config" in overrides:
        text = tiny_sizes("gemma3_text", {}) | {"model_type": "gemma3_text"}
        return AutoConfig.for_model(model_type, **overrides | {"text_config": text})
    return AutoConfig.for_model(model_type, **tiny_sizes(model_type, overrides))


def tiny_sizes(model_type: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The keys of `tiny_config`."""
    standard = AutoConfig.for_model(model_type)
    sizes = {name: value for name, value in SIZES.items() if getattr(standard, name, None) is not None}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": list(STOP_IDS)}
    return {key: value for key, value in (sizes | ids | overrides).items() if value is not None}


def tiny_model(config: PreTrainedConfig, seed: int = 0, scale: float = 0.2) -> PreTrainedModel:
    """Random weights, in float32 and eval mode; `scale` makes some tokens far likelier than others."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomised(model, seed, scale)


def save(family: str, folder: str) -> PreTrainedModel:
    """The model of a family, written as a user has it."""
    model = tiny_model(tiny_config(family))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model
