"""What vLLM is asked for, and what becomes of its answers: the same in this process and over HTTP."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_lightning.engines.philox import philox
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.plugins.fast.batch import groups_of
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, UsageError

CHECK_EVERY = 8
"""Tokens of a completion between two searches for stop strings."""

STRIDE = 2**10
"""Seeds per group: vLLM gives completion i of a request the request's seed + i."""

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def check_lengths(requests: Sequence[Request], sampling: Sampling, limit: int, key: str, fix: str) -> None:
    """Raises UsageError where vLLM would end completions before `max_new_tokens`.

    Args:
        requests: What to complete.
        sampling: For its `max_new_tokens`.
        limit: Longest prompt and completion together.
        key: What sets the limit.
        fix: How it is raised.
    """
    longest = max(len(request.token_ids) for request in requests) + sampling.max_new_tokens
    if longest > limit:
        raise UsageError(
            f"{key}={limit}: a prompt with sampling.max_new_tokens={sampling.max_new_tokens} has {longest} tokens; "
            f"{fix}, or lower sampling.max_new_tokens"
        )


@dataclass(slots=True)
class Call:
    """One request to vLLM. It stands for a group's requests, or for one."""

    token_ids: list[int]
    seed: int | None
    rows: list[list[int]]
    """For each of the request's completions the indices of the requests that it is for."""

    def parameters(self, sampling: Sampling, stop_ids: Set[int]) -> dict[str, Any]:
        """Arguments of `vllm.SamplingParams`.

        Args:
            sampling: The distribution to draw from.
            stop_ids: The policy's stop tokens; no other token ends a completion.
        """
        return {
            "n": len(self.rows),
            "seed": self.seed,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }


def calls_of(requests: Sequence[Request], sampling: Sampling, key: RandomKey, together: bool) -> list[Call]:
    """The requests to vLLM. Greedy decoding draws once per prompt.

    Args:
        requests: What to complete.
        sampling: The distribution to draw from.
        key: Seed of the run and exploration step.
        together: Whether a group may be one request.
    """
    if sampling.greedy:
        return [Call(requests[group[0]].token_ids, None, [list(group)]) for group in groups_of(requests)]
    calls: list[Call] = []
    for row, (request, seed) in enumerate(zip(requests, seeds_of(requests, key), strict=True)):
        last = calls[-1] if calls and together else None
        if (
            last
            and last.seed is not None
            and seed == last.seed + len(last.rows)
            and last.token_ids == request.token_ids
        ):
            last.rows.append([row])
        else:
            calls.append(Call(request.token_ids, seed, [[row]]))
    return calls


def seeds_of(requests: Sequence[Request], key: RandomKey) -> list[int]:
    """A seed below 2^60 per request; those of a group follow one another.

    Of a seed a CPU's generator takes 32 bits: there two prompts in four million share their seeds.
    """
    ids = torch.tensor([(r.position, r.sample // STRIDE, r.prompt_id) for r in requests])
    position, block, prompt = ids.unbind(1)
    mask = 0xFFFFFFFF
    counter = (position, block, prompt & mask, (prompt >> 32) & mask)
    high, low, *_ = philox(counter, (key.seed & mask, key.step & mask))
    groups = ((high & 0x3FFFF) * 2**32 + low).tolist()
    return [group * STRIDE + r.sample % STRIDE for group, r in zip(groups, requests, strict=True)]


@dataclass
class Completions:
    """Completions as they grow; stop strings end them."""

    stops: StopStrings
    drawn: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)

    def add(
        self, rows: Sequence[int], token_ids: Sequence[int], logp: Sequence[float], reason: str | None
    ) -> Completion | None:
        """Adds tokens to the completion of the requests `rows`. Returns it if they end it.

        Args:
            rows: Indices of requests.
            token_ids: The new tokens.
            logp: Their log-probs.
            reason: Why vLLM ended it; None where it goes on.
        """
        ids, logps = self.drawn.setdefault(rows[0], ([], []))
        before = len(ids)
        ids += token_ids
        logps += logp
        if reason is None and not self._ends(ids, before):
            return None
        if reason not in (None, *REASONS):
            raise RuntimeError(f"vLLM ended a completion because of {reason!r}")
        ended = FinishReason.LENGTH if reason is None else REASONS[reason]
        del self.drawn[rows[0]]
        return self.stops.cut(Completion(ids, logps, ended))

    def _ends(self, ids: list[int], before: int) -> bool:
        """Whether a stop string is in the text; looked for every `CHECK_EVERY` tokens."""
        seen = before // CHECK_EVERY * CHECK_EVERY
        return len(ids) // CHECK_EVERY > before // CHECK_EVERY and self.stops.first_end(ids, seen) is not None
