"""A trial before the run: does an engine decode this policy as the policy scores itself?"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import Completion, Request, UsageError

Decode = Callable[[Sequence[Request], Sampling], list[Completion]]
"""Requests and sampling in, completions out; no token ends a completion."""

TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.12}
"""Largest mean difference in nats that rounding explains, by the type of the products. In bfloat16 0.04 is usual."""


def compute_dtype(policy: Policy) -> torch.dtype:
    """Returns the type of matrix products and of the cache: autocast's where it is on, else the type of the weights."""
    kind = policy.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else policy.model.dtype


def fault(policy: Policy, decode: Decode, dtype: torch.dtype | None = None) -> str:
    """Returns the reason why `decode` is wrong, in a few words; empty if it is right.

    Under autocast, whose rounding hides errors, float32 is tried as well, unless `decode` multiplies in a `dtype`.
    """
    kind = policy.device.type
    attention = str(policy.text_config._attn_implementation)
    if "flash" in attention and kind == "cpu":  # Sharded weights are loaded there, and flash is not.
        policy.model.set_attn_implementation("sdpa")
        try:
            return fault(policy, decode, dtype)
        finally:
            policy.model.set_attn_implementation(attention)
    contexts: list[AbstractContextManager[object]] = [nullcontext()]
    mixed = torch.is_autocast_enabled(kind) and policy.model.dtype == torch.float32
    if mixed and dtype is None and "flash" not in attention:
        contexts.append(torch.autocast(kind, enabled=False))
    for context in contexts:
        with context:
            try:
                difference = gap(policy, decode)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return first_line(error)
            products = dtype or compute_dtype(policy)
        tf32 = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
        tolerance = TOLERANCES[torch.float16 if products == torch.float32 and tf32 else products]
        # Written with `not`, so that NaN is refused too.
        if not difference.mean() <= tolerance or not difference.max() <= 8 * tolerance:
            return f"its log-probs would be off by {float(difference.max()):.2g}"
    return ""


def refusal(engine: str, policy: Policy, reason: str, instead: str) -> UsageError:
    """Returns the error for a policy that an engine cannot decode."""
    name = type(policy.model).__name__
    return UsageError(f"model.engine={engine} cannot decode {name} ({reason}): use {instead}")


@torch.no_grad()
def gap(policy: Policy, decode: Decode) -> Tensor:
    """[tokens] differences in nats between the log-probs of `decode` and of a plain forward, on every rank."""
    # Two prompts of a few tokens, two completions each, within the context.
    special = {*policy.stop_ids, policy.text_config.pad_token_id}
    vocabulary = policy.text_config.vocab_size
    ids = [token for token in (index * 7 % vocabulary for index in range(vocabulary)) if token not in special]
    requests = [Request(prompt, id, sample) for id, prompt in enumerate((ids[:5], ids[1:2])) for sample in range(2)]
    length = min(6, (policy.context_length or 2**31) - 5)
    completions = decode(requests, Sampling(max_new_tokens=max(1, length)))
    differences = []
    with policy.evaluating():
        for request, completion in zip(requests, completions, strict=True):
            prompt = request.token_ids
            input_ids = torch.tensor([[*prompt, *completion.token_ids]], device=policy.device)
            logits = policy.logits(policy.hidden(input_ids, use_cache=False)[0, len(prompt) - 1 : -1])
            assert completion.logp is not None
            expected = logits.log_softmax(-1).gather(-1, input_ids[0, len(prompt) :, None]).squeeze(-1)
            difference = (expected - torch.tensor(completion.logp, device=policy.device)).abs()
            differences.append(difference.nan_to_num(torch.inf).cpu())
    return torch.cat(differences)
