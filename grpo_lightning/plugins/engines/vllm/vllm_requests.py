"""What vLLM is asked for, and what becomes of its answers: the same in this process and over HTTP."""

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
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, require

CHECK_EVERY = 8  # tokens of a completion between two searches for stop strings
STRIDE = 2**10  # seeds per group: vLLM gives completion i of a request the request's seed + i


@dataclass(slots=True)
class Call:
    """One request to vLLM. It stands for a group's requests, or for one."""

    token_ids: list[int]
    seed: int | None
    rows: list[list[int]]  # for each of the request's completions the indices of the requests that it is for
    drawn: int = 0  # tokens at the end of `token_ids` that were drawn before

    def parameters(self, sampling: Sampling, stop_ids: Set[int]) -> dict[str, Any]:
        """Arguments of `vllm.SamplingParams`."""
        return {
            "n": len(self.rows),
            "seed": self.seed,
            "max_tokens": sampling.max_new_tokens - self.drawn,
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
    """The requests to vLLM. Greedy decoding draws once per prompt."""
    if sampling.greedy:
        return [Call(requests[group[0]].token_ids, None, [list(group)]) for group in groups_of(requests)]
    calls: list[Call] = []
    for row, (request, seed) in enumerate(zip(requests, seeds_of(requests, key), strict=True)):
        last = calls[-1] if calls and together else Call([], -1, [])
        assert last.seed is not None
        if (seed, request.token_ids) == (last.seed + len(last.rows), last.token_ids):
            last.rows.append([row])
        else:
            calls.append(Call(request.token_ids, seed, [[row]]))
    return calls


def seeds_of(requests: Sequence[Request], key: RandomKey) -> list[int]:
    """A seed below 2^60 per request; those of a group follow one another.

    Of a seed a CPU's generator takes 32 bits: there two prompts in four million share their seeds.
    """
    position, block, prompt = torch.tensor([(r.position, r.sample // STRIDE, r.prompt_id) for r in requests]).unbind(1)
    mask = 0xFFFFFFFF
    counter = (position, block, prompt & mask, (prompt >> 32) & mask)
    high, low, *_ = philox(counter, (key.seed & mask, key.step & mask))
    groups = ((high & 0x3FFFF) * 2**32 + low).tolist()
    return [group * STRIDE + r.sample % STRIDE for group, r in zip(groups, requests, strict=True)]


def dtype_of(policy: Policy) -> str:
    """The type that the policy computes in, as vLLM names it."""
    return str(compute_dtype(policy)).removeprefix("torch.")


class Drawing:
    """The requests to vLLM for some completions, and the completions as they grow; stop strings end them.

    `limit` bounds prompt and completion together; `setting` names what sets it, and how it is raised.
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
        require(
            longest <= limit,
            f"{setting[0]}={limit}: a prompt with sampling.max_new_tokens={sampling.max_new_tokens} has {longest} "
            f"tokens; {setting[1]}, or lower sampling.max_new_tokens",
        )
        self._requests, self._key = requests, key
        self.stops = StopStrings(policy, sampling.stop)
        self.streams = bool(self.stops.strings)  # completions that are searched for strings come piece by piece
        self.calls = calls_of(requests, sampling, key, together=not self.streams)
        # The completions that each call has still to end, by the call's index; calls that have ended are gone.
        self.open = {index: len(call.rows) for index, call in enumerate(self.calls)}
        self._drawn: dict[int, tuple[list[int], list[float], list[int]]] = {}

    def prompt_id(self, index: int) -> int:
        """The prompt of a call."""
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
        """Adds tokens to a completion. Returns it, for every request that it stands for, if they end it.

        `index` is that of the call, `number` that of the completion in it. `reason` is None where vLLM goes on.
        """
        rows = self.calls[index].rows[number]
        ids, logps, versions = self._drawn.setdefault(rows[0], ([], [], []))
        seen = len(ids) // CHECK_EVERY * CHECK_EVERY
        ids += token_ids
        logps += logp
        versions += [] if version is None else [version] * len(token_ids)
        if reason is None and (len(ids) < seen + CHECK_EVERY or self.stops.first_end(ids, seen) is None):
            return []
        if reason not in (None, *FinishReason):
            raise RuntimeError(f"vLLM ended a completion because of {reason!r}")
        del self._drawn[rows[0]]
        self._end(index)
        completion = self.stops.cut(Completion(ids, logps, FinishReason(reason or "length")))
        completion.versions = versions[: len(completion.token_ids)] or None
        return [(row, completion) for row in rows]

    def _end(self, index: int) -> None:
        self.open[index] -= 1
        if not self.open[index]:
            del self.open[index]

    def carry_on(self, index: int, number: int) -> int:
        """The index of a call of its own for the rest of a completion, with random numbers of its position."""
        call, rows = self.calls[index], self.calls[index].rows[number]
        request, ids = self._requests[rows[0]], self._drawn.setdefault(rows[0], ([], [], []))[0]
        rest = replace(request, token_ids=[*request.token_ids, *ids], position=request.position + len(ids))
        seed = None if call.seed is None else seeds_of([rest], self._key)[0]
        self.calls.append(Call(rest.token_ids, seed, [rows], len(ids)))
        self._end(index)
        self.open[len(self.calls) - 1] = 1
        return len(self.calls) - 1

    def restart(self, index: int) -> None:
        """Forgets what a call has drawn: it will be asked again."""
        for rows in self.calls[index].rows:
            for numbers in self._drawn.get(rows[0], ()):
                del numbers[self.calls[index].drawn :]
