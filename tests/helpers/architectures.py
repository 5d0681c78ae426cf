"""Tiny random models of the causal architectures that transformers ships, and what each part makes of them."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.fast.batch import Batch
from grpo_lightning.plugins.fast.kv_memory import cache_bytes_per_token
from grpo_lightning.plugins.fast.native import NativeEngine, _decoding
from grpo_lightning.plugins.fast.shared_prefix import ATTENTION
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey, Request, UsageError
from helpers.tiny import STOP_IDS, prompts_of, requests_of, tokenizer

VOCABULARY = 64
CONTEXT = 64

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "max_seq_len": CONTEXT,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "word_embed_proj_dim": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rotary_dim": 4,
    "query_pre_attn_scalar": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "lru_width": 32,
    "attention_window_size": 8,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
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

EAGER_IS_WRONG = {"falcon (alibi)": "sdpa"}
"""Falcon's eager attention adds its bias twice (transformers 5.23)."""


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
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(scale * noise)
            else:
                parameter.add_(0.1 * noise)
    return model.eval()


@dataclass
class Finding:
    """What became of one family."""

    family: str
    name: str
    """Of its class."""
    attention: str = ""
    """What transformers calls the attention it was loaded with."""
    shares_prefix: bool = False
    refused: str = ""
    """Why no policy can be made of it."""
    native: str = ""
    """Why NativeEngine refuses it; empty where it decodes it."""
    plain: str = ""
    """Likewise PlainEngine."""
    errors: tuple[str, ...] = ()
    """Whatever went wrong: raw exceptions and wrong numbers."""


def save(family: str, folder: str) -> PreTrainedModel:
    """The model of a family, written as a user has it."""
    model = tiny_model(tiny_config(family))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


def sentence(error: UsageError) -> str:
    """The text of a refusal, which must be one line that names what to do instead."""
    text = str(error)
    assert "\n" not in text and ("use " in text or "Give " in text), text
    return text


def examine(family: str, dtype: str = "float32") -> Finding:
    """Loads the family as a user does, and compares scoring and decoding with plain forwards of another copy."""
    with tempfile.TemporaryDirectory() as folder:
        model = save(family, folder)
        reference = model
        if family in EAGER_IS_WRONG:
            reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=EAGER_IS_WRONG[family]).eval()
        finding, errors = Finding(family, type(model).__name__), []
        policy = Policy(folder, dtype=dtype)
        try:
            policy.check()
            policy.load()
        except UsageError as error:
            finding.refused = sentence(error).replace(folder, "PATH")
            return finding
        finding.attention = str(policy.text_config._attn_implementation).replace(ATTENTION, "sdpa")
        finding.shares_prefix = policy.shares_prefix
        errors += scoring_errors(policy, reference, dtype)
        finding.native, native_errors = decoding(NativeEngine(), policy, reference, dtype)
        finding.plain, other_errors = decoding(PlainEngine(), policy, reference, dtype)
        finding.errors = tuple(errors + native_errors + other_errors)
        return finding


@torch.no_grad()
def expected_logp(reference: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """[R] from a forward over one unpadded sequence."""
    logits = reference(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0].double()
    logp = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return logp.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1).float()


SCORED = 2e-4
"""Largest difference in nats between two float32 forwards of these models."""

SCORED_BFLOAT16 = 0.5
"""Largest difference in nats that bfloat16 weights make to the log-probs of these models."""


def scoring_errors(policy: Policy, reference: PreTrainedModel, dtype: str) -> list[str]:
    """What is wrong with the policy's log-probs, row by row and with shared prefixes, the second in training mode."""
    prompts, group = [[7, 9, 30, 11, 50], [40, 8], [9, 21, 33, 10, 17, 28, 44, 61, 19, 12]], [0, 1, 0, 2, 2, 1]
    completions = [
        [20, 3],
        [51, 8, 9, 10, 44, 45, 30, 31, 7, 60, 62, 3],
        [21, 22, 23, 40, 3],
        [13],
        [10, 11, 3],
        [33, 34],
    ]
    rollouts = Rollouts.from_lists(prompts, group, completions)
    expected = torch.cat([expected_logp(reference, prompts[g], c) for g, c in zip(group, completions, strict=True)])
    limit, found = (SCORED if dtype == "float32" else SCORED_BFLOAT16), []
    shares, gradients = policy.shares_prefix, {}
    for policy.shares_prefix, training in ((False, False), (shares, True)):
        policy.train(training)
        way = f"scoring, shared={policy.shares_prefix}, training={training}"
        policy.zero_grad()
        try:
            logp = policy(rollouts).logp
            logp.sum().backward()
        except Exception as error:
            found.append(f"{way}: {type(error).__name__} {error}")
            continue
        off = float((logp.detach() - expected).abs().max())
        if not off <= limit:
            found.append(f"{way}: off by {off:.2g}")
        parts = [p.grad.flatten().float() for p in policy.parameters() if p.grad is not None]
        gradients[way] = torch.cat(parts)
    policy.shares_prefix = shares
    policy.eval()
    first = next(iter(gradients.values()), torch.zeros(1))
    for way, gradient in gradients.items():
        off = float((gradient - first).norm() / first.norm())
        if not off <= (1e-3 if dtype == "float32" else 0.2):
            found.append(f"{way}: gradient off by {off:.2g} of its norm")
    return found


def decoding(engine: RolloutEngine, policy: Policy, reference: PreTrainedModel, dtype: str) -> tuple[str, list[str]]:
    """Why the engine refuses the policy, and what is wrong with what it decodes."""
    name = type(engine).__name__
    prompts, group_size = prompts_of([5, 1, 9]), 2
    before, state = policy.text_config._attn_implementation, torch.get_rng_state()
    try:
        engine.check(policy, Sampling(max_new_tokens=10))
    except UsageError as error:
        return sentence(error), []
    except Exception as error:
        return "", [f"{name}.check: {type(error).__name__} {error}"]
    finally:
        assert policy.text_config._attn_implementation == before
        assert torch.get_rng_state().equal(state)
    engine.sync(policy)
    found = []
    try:
        done = engine.complete(Request.from_prompts(prompts, group_size), Sampling(max_new_tokens=10), RandomKey(1, 0))
        off = max(gap(reference, prompts[row // group_size].token_ids, each) for row, each in enumerate(done))
        if not off <= (SCORED if dtype == "float32" else SCORED_BFLOAT16):
            found.append(f"{name}: off by {off:.2g}")
    except Exception as error:
        found.append(f"{name}: {type(error).__name__} {error}")
    if isinstance(engine, NativeEngine):
        said, real = cache_bytes_per_token(policy.config, policy.dtype), cached_bytes(policy)
        found += [] if said == real else [f"{said} bytes per token in the cache, really {real}"]
    return "", found


def cached_bytes(policy: Policy) -> float:
    """Bytes per token and row that NativeEngine's cache really takes."""
    with _decoding(policy), torch.no_grad():
        rows = Batch(policy, requests_of([3], 2), [[0, 1]], Sampling(max_new_tokens=4), RandomKey(), None)._read()
    return sum(slab.nbytes for layer in rows.layers for slab in (layer.key_slab, layer.value_slab)) / (2 * (3 + 4))


def gap(reference: PreTrainedModel, prompt: list[int], completion: Completion) -> float:
    """Largest difference of one completion's log-probs."""
    expected = expected_logp(reference, prompt, completion.token_ids)
    return float((expected - torch.tensor(completion.logp)).abs().max())
