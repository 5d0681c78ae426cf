"""The calls of vLLM for some completions, and their answers: the same in this process and over HTTP."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_lightning.engines.philox import philox
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.plugins.engines.native.native_batch import groups_of
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, UsageError

CHECK_EVERY = 8
"""Tokens of a completion between two searches for stop strings."""
STRIDE = 2**10
"""Seeds per group: completion i of a call gets the call's seed + i from vLLM."""


@dataclass(slots=True)
class SamplingCall:
    """A request to vLLM, for all requests of a group or for one of them."""

    token_ids: list[int]
    """The tokens to continue."""
    seed: int | None
    """Seed of the first completion; None for greedy decoding."""
    rows: list[list[int]]
    """For each completion of the call the indices of the requests that it answers."""
    num_sampled: int = 0
    """Tokens at the end of `token_ids` that were sampled by an earlier call."""

    def parameters(self, sampling: Sampling, stop_ids: Set[int]) -> dict[str, Any]:
        """Returns the arguments of `vllm.SamplingParams`."""
        return {
            "n": len(self.rows),
            "seed": self.seed,
            "max_tokens": sampling.max_new_tokens - self.num_sampled,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }


def calls_of(requests: Sequence[Request], sampling: Sampling, key: RandomKey, together: bool) -> list[SamplingCall]:
    """Returns the calls for some requests. Greedy decoding answers all requests of a prompt with one completion.

    Args:
        requests: The requests, neighbours in a group one after the other.
        sampling: The distribution to sample from.
        key: The random numbers.
        together: Join requests of a group to one call.
    """
    if sampling.greedy:
        return [SamplingCall(requests[group[0]].token_ids, None, [list(group)]) for group in groups_of(requests)]
    calls: list[SamplingCall] = []
    for row, (request, seed) in enumerate(zip(requests, seeds_of(requests, key), strict=True)):
        last = calls[-1] if calls and together else SamplingCall([], -1, [])
        assert last.seed is not None
        if (seed, request.token_ids) == (last.seed + len(last.rows), last.token_ids):
            last.rows.append([row])
        else:
            calls.append(SamplingCall(request.token_ids, seed, [[row]]))
    return calls


def seeds_of(requests: Sequence[Request], key: RandomKey) -> list[int]:
    """Returns a seed below 2^60 per request. The seeds of a group follow one another.

    CPU generators use only 32 bits of a seed, so there two prompts in four million share their seeds.
    """
    triples = [(request.position, request.sample // STRIDE, request.prompt_id) for request in requests]
    position, block, prompt = torch.tensor(triples).unbind(1)
    mask = 0xFFFFFFFF
    counter = (position, block, prompt & mask, (prompt >> 32) & mask)
    high, low, *_ = philox(counter, (key.seed & mask, key.step & mask))
    numbers = ((high & 0x3FFFF) * 2**32 + low).tolist()
    return [number * STRIDE + request.sample % STRIDE for number, request in zip(numbers, requests, strict=True)]


def dtype_of(policy: Policy) -> str:
    """Returns vLLM's name of the type that the policy computes in."""
    return str(compute_dtype(policy)).removeprefix("torch.")


class Generation:
    """The calls for some completions, and the completions as they grow until a stop string or vLLM ends them.

    Args:
        requests: The requests to answer.
        sampling: The distribution to sample from, and what ends a completion.
        key: The random numbers.
        policy: The policy, for its stop tokens and its tokenizer.
        limit: Most tokens of prompt and completion together.
        setting: The setting of the limit, and how to raise it, for the message.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        key: RandomKey,
        policy: Policy,
        limit: int,
        setting: tuple[str, str],
    ) -> None:
        longest = max(len(request.token_ids) for request in requests) + sampling.max_new_tokens
        if longest > limit:
            raise UsageError(
                f"{setting[0]}={limit}: a prompt with sampling.max_new_tokens={sampling.max_new_tokens} has {longest} "
                f"tokens; {setting[1]}, or lower sampling.max_new_tokens"
            )
        self._requests = requests
        self._key = key
        self.stops = StopStrings(policy, sampling.stop)
        self.streams = bool(self.stops.strings)
        """True if answers come piece by piece, to be searched for stop strings."""
        self.calls = calls_of(requests, sampling, key, together=not self.streams)
        self.open = {index: len(call.rows) for index, call in enumerate(self.calls)}
        """Number of completions that each call has still to end, by its index. Calls that have ended are removed."""
        self._sampled: dict[int, tuple[list[int], list[float], list[int]]] = {}
        """Token ids, log-probs and versions of each completion that goes on, by the first request that it answers."""

    def prompt_id(self, index: int) -> int:
        """Returns the prompt id of a call."""
        return self._requests[self.calls[index].rows[0][0]].prompt_id

    def add(
        self,
        index: int,
        number: int,
        token_ids: Sequence[int],
        logp: Sequence[float],
        reason: str | None,
        version: int | None = None,
    ) -> list[tuple[int, Completion]]:
        """Adds tokens to a completion. If they end it, returns it with the index of every request that it answers.

        Args:
            index: Index of the call.
            number: Index of the completion in the call.
            token_ids: The new tokens.
            logp: The log-prob of each.
            reason: Why vLLM has ended the completion; None if it goes on.
            version: `Policy.version` of the weights that sampled the tokens.
        """
        rows = self.calls[index].rows[number]
        ids, logps, versions = self._sampled.setdefault(rows[0], ([], [], []))
        num_searched = len(ids) // CHECK_EVERY * CHECK_EVERY
        ids += token_ids
        logps += logp
        versions += [] if version is None else [version] * len(token_ids)
        is_due = len(ids) >= num_searched + CHECK_EVERY
        if reason is None and not (is_due and self.stops.first_end(ids, num_searched) is not None):
            return []
        if reason not in (None, *FinishReason):
            raise RuntimeError(f"vLLM ended a completion because of {reason!r}")
        del self._sampled[rows[0]]
        self._end(index)
        completion = self.stops.cut(Completion(ids, logps, FinishReason(reason or "length")))
        completion.versions = versions[: len(completion.token_ids)] or None
        return [(row, completion) for row in rows]

    def _end(self, index: int) -> None:
        """Counts a completion of a call as ended."""
        self.open[index] -= 1
        if not self.open[index]:
            del self.open[index]

    def carry_on(self, index: int, number: int) -> int:
        """Adds a call for the rest of a completion, with the random numbers of its position. Returns its index."""
        call = self.calls[index]
        rows = call.rows[number]
        request = self._requests[rows[0]]
        ids, *_ = self._sampled.setdefault(rows[0], ([], [], []))
        continued = replace(request, token_ids=[*request.token_ids, *ids], position=request.position + len(ids))
        seed = None if call.seed is None else seeds_of([continued], self._key)[0]
        self.calls.append(SamplingCall(continued.token_ids, seed, [rows], len(ids)))
        self._end(index)
        self.open[len(self.calls) - 1] = 1
        return len(self.calls) - 1

    def restart(self, index: int) -> None:
        """Drops the tokens that a call has sampled: it will be made again."""
        for rows in self.calls[index].rows:
            for values in self._sampled.get(rows[0], ()):
                del values[self.calls[index].num_sampled :]
