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
"""Requests and sampling in, completions out; no token ends one."""

PROMPT_LENGTHS = (5, 1)
GROUP_SIZE = 2
NEW_TOKENS = 6

TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.12}
"""Largest mean difference in nats that rounding explains, by the type of the products.

For a trained model in bfloat16 the mean is 0.04, and one token in 300 is off by more than 0.25."""


def compute_dtype(policy: Policy) -> torch.dtype:
    """The type of matrix products, and of the cache: that of autocast where it is on, else of the weights."""
    kind = policy.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else policy.model.dtype


SINGLE = 8
"""Largest difference of a single token, as a multiple of the tolerated mean difference."""


def tolerance(policy: Policy, dtype: torch.dtype | None = None) -> float:
    """Largest mean difference in nats between two ways to compute log-probs that rounding explains.

    Args:
        policy: What computes one of them.
        dtype: Type of the other's products; None is the policy's.
    """
    dtype = dtype or compute_dtype(policy)
    tf32 = policy.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return TOLERANCES[torch.float16 if dtype == torch.float32 and tf32 else dtype]


def fault(
    policy: Policy, decode: Decode, prompt_lengths: Sequence[int] = PROMPT_LENGTHS, dtype: torch.dtype | None = None
) -> str:
    """What is wrong with `decode`, in a few words; empty if nothing is.

    Under autocast, whose rounding hides errors, float32 is tried as well.

    Args:
        policy: What scores itself.
        decode: What is tried.
        prompt_lengths: Tokens of the prompts.
        dtype: Type of the products of `decode`, if it has one of its own. Then it is tried in this type alone.
    """
    kind = policy.device.type
    attention = str(policy.text_config._attn_implementation)
    if "flash" in attention and kind == "cpu":  # Sharded weights are loaded there, and flash is not.
        policy.model.set_attn_implementation("sdpa")
        try:
            return fault(policy, decode, prompt_lengths, dtype)
        finally:
            policy.model.set_attn_implementation(attention)
    contexts: list[AbstractContextManager[object]] = [nullcontext()]
    mixed = torch.is_autocast_enabled(kind) and policy.model.dtype == torch.float32
    if mixed and dtype is None and "flash" not in attention:
        contexts.append(torch.autocast(kind, enabled=False))
    for context in contexts:
        with context:
            try:
                off = gap(policy, decode, prompt_lengths)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return first_line(error)
            tolerated = tolerance(policy, dtype)
            if not off.mean() <= tolerated or not off.max() <= SINGLE * tolerated:
                return f"its log-probs would be off by {float(off.max()):.2g}"
    return ""


def refusal(engine: str, policy: Policy, reason: str, instead: str) -> UsageError:
    """The error for a policy that an engine cannot decode."""
    name = type(policy.model).__name__
    return UsageError(f"model.engine={engine} cannot decode {name} ({reason}): use {instead}")


@torch.no_grad()
def gap(policy: Policy, decode: Decode, prompt_lengths: Sequence[int] = PROMPT_LENGTHS) -> Tensor:
    """[tokens] differences in nats between the log-probs of `decode` and those of a plain forward.

    A handful of tiny forwards. No global random number is drawn, and every rank computes the same.
    """
    length = min(NEW_TOKENS, (policy.context_length or 2**31) - max(prompt_lengths))
    requests = _requests(policy, prompt_lengths)
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


def _requests(policy: Policy, lengths: Sequence[int]) -> list[Request]:
    """`GROUP_SIZE` requests per length, of ordinary tokens."""
    special = {*policy.stop_ids, policy.text_config.pad_token_id}
    vocabulary = policy.text_config.vocab_size
    ids = [token for token in range(11, vocabulary * 7, 7) if token % vocabulary not in special]
    ids = [token % vocabulary for token in ids]
    return [
        Request(ids[prompt : prompt + length], prompt, sample)
        for prompt, length in enumerate(lengths)
        for sample in range(GROUP_SIZE)
    ]
