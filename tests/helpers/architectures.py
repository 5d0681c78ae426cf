"""What each part makes of the causal architectures that transformers ships."""

import tempfile
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_lightning import Fast, PlainEngine, Policy, RolloutEngine, Rollouts, Sampling, StopStrings
from grpo_lightning.plugins.compute.fast.shared_prefix import ATTENTION
from grpo_lightning.plugins.engines.native.kv_memory import cache_bytes_per_token
from grpo_lightning.plugins.engines.native.native import NativeEngine, slab_attention
from grpo_lightning.plugins.engines.native.native_batch import Batch
from grpo_lightning.types import RandomKey, Request, UsageError
from helpers.drawing import gap
from helpers.families import save
from helpers.tiny import forced_logp, prompts_of, requests_of

EAGER_IS_WRONG = {"falcon (alibi)": "sdpa"}
"""Falcon's eager attention adds its bias twice (transformers 5.23)."""


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
        policy = Policy(folder, dtype=dtype, compute=Fast())
        try:
            policy.check()
            policy.load()
        except UsageError as error:
            finding.refused = sentence(error).replace(folder, "PATH")
            return finding
        finding.attention = str(policy.text_config._attn_implementation).replace(ATTENTION, "sdpa")
        finding.shares_prefix = policy.compute.shares_prefix
        errors += scoring_errors(policy, reference, dtype)
        finding.native, native_errors = decoding(NativeEngine(), policy, reference, dtype)
        finding.plain, other_errors = decoding(PlainEngine(), policy, reference, dtype)
        finding.errors = tuple(errors + native_errors + other_errors)
        return finding


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
    expected = torch.cat([forced_logp(reference, prompts[g], c) for g, c in zip(group, completions, strict=True)])
    limit, found = (SCORED if dtype == "float32" else SCORED_BFLOAT16), []
    shares, gradients = policy.compute.shares_prefix, {}
    for policy.compute.shares_prefix, training in ((False, False), (shares, True)):
        policy.train(training)
        way = f"scoring, shared={policy.compute.shares_prefix}, training={training}"
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
    policy.compute.shares_prefix = shares
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
        off = gap(policy, prompts, done, model=reference)
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
    with slab_attention(policy), torch.no_grad():
        stops = StopStrings(policy, [])
        batch = Batch(policy, requests_of([3], 2), [[0, 1]], Sampling(max_new_tokens=4), RandomKey(), stops)
        batch.read()
    return sum(slab.nbytes for layer in batch.layers for slab in layer.slabs) / (2 * (3 + 4))
