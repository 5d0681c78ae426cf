"""Decoding as it is defined: read the prompts, then draw a token per row, pass it on, and drop the rows that ended."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import grpo_lightning.engines.trial as trial
from grpo_lightning.engines.engine import Drawn, RolloutEngine
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.policy.architecture import cache_name
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey, Request, UsageError


class PlainEngine(RolloutEngine):
    """Decodes with the policy's own weights, with the attention and the cache of transformers.

    It decodes nearly every model. Prompts are padded on the left; equal ones are read once and copied to their rows.

    Args:
        max_rows: Completions decoded together. The others wait.
        max_tokens: Tokens of prompts read together, padding included. Longer prompts are read in pieces.
        check_every: Positions decoded between two checks for completions that have ended.
    """

    shares_weights = True

    def __init__(self, max_rows: int = 1024, max_tokens: int = 16384, check_every: int = 8) -> None:
        if max_rows < 1 or max_tokens < 1 or check_every < 1:
            raise UsageError(f"max_rows={max_rows}, max_tokens={max_tokens}, check_every={check_every}: give 1 or more")
        self.max_rows, self.max_tokens, self.check_every = max_rows, max_tokens, check_every
        self._max_read: int | None = max_tokens  # None for a model that must read its prompts whole, by `check`

    def check(self, policy: Policy, sampling: Sampling) -> None:
        endless = StopStrings(policy, [])
        endless.ids = frozenset()

        def decode(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            engine = PlainEngine()
            engine._max_read = self._max_read and 4  # Two columns of two prompts.
            drawn = engine._draw(policy, requests, sampling, RandomKey(), endless)
            return [completion for _, completion in sorted(drawn)]

        with policy.gathered():
            for max_read in (self.max_tokens, None):
                self._max_read = max_read
                if not (fault := trial.fault(policy, decode)):
                    return
        raise trial.refusal("PlainEngine", policy, fault, "another model")

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        assert self.policy is not None, "call sync(policy) first"
        return self._draw(self.policy, requests, sampling, key, StopStrings(self.policy, sampling.stop))

    @torch.no_grad()
    def _draw(
        self, policy: Policy, requests: Sequence[Request], sampling: Sampling, key: RandomKey, stops: StopStrings
    ) -> Drawn:
        # Prompts of similar length need little padding, and equal ones stand side by side.
        order = sorted(range(len(requests)), key=lambda row: (len(requests[row].token_ids), requests[row].token_ids))
        for first in range(0, len(order), self.max_rows):
            going = order[first : first + self.max_rows]
            with policy.evaluating():
                rows = _Rows(policy, [requests[row] for row in going], sampling, key, self._max_read)
            drawn: dict[int, tuple[list[int], list[float]]] = {row: ([], []) for row in going}
            while going:
                ended, seen = {}, rows.num_sampled
                with policy.evaluating():
                    columns = rows.decode(self.check_every)
                for row, token_ids, logp in zip(going, *columns, strict=True):
                    drawn[row][0].extend(token_ids)
                    drawn[row][1].extend(logp)
                    if completion := stops.ended(*drawn[row], seen, sampling.max_new_tokens):
                        ended[row] = completion
                yield from ended.items()
                stay = [index for index, row in enumerate(going) if row not in ended]
                if 0 < len(stay) < len(going):
                    rows.keep(stay)
                going = [going[index] for index in stay]


class _Rows:
    """Completions that are decoded together, a row of the cache each."""

    def __init__(
        self, policy: Policy, requests: Sequence[Request], sampling: Sampling, key: RandomKey, max_tokens: int | None
    ) -> None:
        self.policy, self.sampling, self.num_sampled = policy, sampling, 0
        self.cache_name = cache_name(policy.trunk)
        self.takes_position = "position_ids" in inspect.signature(policy.trunk.forward).parameters
        self.cache: Any = None
        self.logits = torch.empty(0)
        device, prompts = policy.device, [tuple(request.token_ids) for request in requests]
        keys = torch.tensor([(r.prompt_id, r.sample, r.position) for r in requests], device=device)
        self.uniform = uniforms(key, keys[:, 0], keys[:, 1], keys[:, 2], sampling.max_new_tokens)
        index = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        self.width = max(map(len, index))
        ids = torch.tensor([[0] * (self.width - len(prompt)) + [*prompt] for prompt in index], device=device)
        seen = torch.tensor([[0] * (self.width - len(prompt)) + [1] * len(prompt) for prompt in index], device=device)
        self.mask = pad(seen, (0, sampling.max_new_tokens), value=1)
        size = self.width if max_tokens is None else max(1, max_tokens // len(ids))
        for first in range(0, self.width, size):
            self._forward(ids[:, first : first + size], min(first + size, self.width))
        self.token = self._take([index[prompt] for prompt in prompts])

    def decode(self, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """Draws up to `count` tokens per row. Returns the tokens and their log-probs, row by row."""
        drawn = []
        for _ in range(min(count, self.sampling.max_new_tokens - self.num_sampled)):
            if self.num_sampled:
                self._forward(self.token[:, None], self.width + self.num_sampled)
            self.token, logp = draw(self.logits, self.uniform[:, self.num_sampled], self.sampling)
            self.num_sampled += 1
            drawn.append((self.token, logp))
        tokens, logps = (torch.stack(column, 1).tolist() for column in zip(*drawn, strict=True))
        return tokens, logps

    def keep(self, rows: list[int]) -> None:
        """Drops all rows but these."""
        index = self._take(rows)
        self.token, self.uniform = self.token[index], self.uniform[index]

    def _take(self, rows: list[int]) -> Tensor:
        """Makes row i of the cache what row `rows[i]` was, and returns [r] `rows`. A row may occur several times."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.reorder_cache(index)
        self.logits, self.mask = self.logits[index], self.mask[index]
        return index

    def _forward(self, ids: Tensor, length: int) -> None:
        """Passes on [r, T] tokens, whose columns end at `length`; finds the logits [r, V] of what follows."""
        mask = self.mask[:, :length]
        position = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        is_recurrent = self.policy.model._is_stateful and not self.takes_position
        if self.cache_name == "cache_params" or is_recurrent:  # Mamba's cache has no columns.
            mask = mask[:, -ids.shape[1] :]
        where = {"position_ids": position} if self.takes_position else {}
        inputs = {self.cache_name: self.cache, "attention_mask": mask, **where}
        output = self.policy.trunk(input_ids=ids, use_cache=True, **inputs)
        self.logits = self.policy.logits(output.last_hidden_state[:, -1])
        self.cache = output[self.cache_name]
