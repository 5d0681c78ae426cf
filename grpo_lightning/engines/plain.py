"""Decoding as it is defined: read the prompts, sample a token per row, pass it on, and drop the rows that ended."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import grpo_lightning.engines.trial as trial
from grpo_lightning.engines.engine import Completions, RolloutEngine
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, sample_tokens
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.maths import ragged
from grpo_lightning.maths.images import decoder_inputs
from grpo_lightning.maths.rollouts import Rollouts
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
    reads_images = True

    def __init__(self, max_rows: int = 1024, max_tokens: int = 16384, check_every: int = 8) -> None:
        if max_rows < 1 or max_tokens < 1 or check_every < 1:
            raise UsageError(f"max_rows={max_rows}, max_tokens={max_tokens}, check_every={check_every}: give 1 or more")
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.check_every = check_every
        self._max_read: int | None = max_tokens
        """Tokens of prompts read together; `check` sets it to None for a model that must read its prompts whole."""

    def check(self, policy: Policy, sampling: Sampling) -> None:
        # In the trial no token ends a completion.
        endless = StopStrings(policy, [])
        endless.ids = frozenset()

        def decode(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            engine = PlainEngine()
            # Pieces of two columns of the trial's two prompts.
            engine._max_read = self._max_read and 4
            completions = engine._decode(policy, requests, sampling, RandomKey(), endless)
            return [completion for _, completion in sorted(completions)]

        with policy.gathered():
            for max_read in (self.max_tokens, None):
                self._max_read = max_read
                if not (fault := trial.fault(policy, decode)):
                    return
        raise trial.refusal("PlainEngine", policy, fault, "another model")

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Completions:
        assert self.policy is not None, "call sync(policy) first"
        return self._decode(self.policy, requests, sampling, key, StopStrings(self.policy, sampling.stop))

    @torch.no_grad()
    def _decode(
        self, policy: Policy, requests: Sequence[Request], sampling: Sampling, key: RandomKey, stops: StopStrings
    ) -> Completions:
        # Prompts of similar length need little padding, and equal ones stand side by side.
        prefixes = [request.prefix for request in requests]
        order = sorted(range(len(requests)), key=lambda index: (len(prefixes[index][0]), prefixes[index]))
        for start in range(0, len(order), self.max_rows):
            # The request of each row that is decoded.
            request_of_row = order[start : start + self.max_rows]
            with policy.evaluating():
                rows = _Rows(policy, [requests[index] for index in request_of_row], sampling, key, self._max_read)
            sampled: dict[int, tuple[list[int], list[float]]] = {index: ([], []) for index in request_of_row}

            while request_of_row:
                num_checked = rows.num_sampled
                with policy.evaluating():
                    columns = rows.decode(self.check_every)

                # Which completions have ended at one of the new positions?
                completions = {}
                for index, token_ids, logp in zip(request_of_row, *columns, strict=True):
                    sampled[index][0].extend(token_ids)
                    sampled[index][1].extend(logp)
                    if completion := stops.ended(*sampled[index], num_checked, sampling.max_new_tokens):
                        completions[index] = completion
                yield from completions.items()

                # Only the other rows are decoded further.
                unfinished = [row for row, index in enumerate(request_of_row) if index not in completions]
                if 0 < len(unfinished) < len(request_of_row):
                    rows.keep(unfinished)
                request_of_row = [request_of_row[row] for row in unfinished]


class _Rows:
    """Completions that are decoded together, with a row of the cache each."""

    def __init__(
        self, policy: Policy, requests: Sequence[Request], sampling: Sampling, key: RandomKey, max_tokens: int | None
    ) -> None:
        self.policy = policy
        self.sampling = sampling
        self.num_sampled = 0
        self.cache_name = cache_name(policy.trunk)
        self.takes_position = "position_ids" in inspect.signature(policy.trunk.forward).parameters
        self.cache: Any = None
        self.logits = torch.empty(0)

        device = policy.device
        keys = torch.tensor([(r.prompt_id, r.sample, r.position) for r in requests], device=device)
        self.uniform = uniforms(key, keys[:, 0], keys[:, 1], keys[:, 2], sampling.max_new_tokens)

        # Each different prompt is one row here, padded on the left.
        request_by_prefix = {request.prefix: request for request in requests}
        row_by_prefix = {prefix: row for row, prefix in enumerate(request_by_prefix)}
        prompts = [request.token_ids for request in request_by_prefix.values()]
        self.width = max(map(len, prompts))
        padding = [[0] * (self.width - len(prompt)) for prompt in prompts]
        pairs = list(zip(padding, prompts, strict=True))
        ids = torch.tensor([[*zeros, *prompt] for zeros, prompt in pairs], device=device)
        attention_mask = torch.tensor([zeros + [1] * len(prompt) for zeros, prompt in pairs], device=device)
        self.mask = pad(attention_mask, (0, sampling.max_new_tokens), value=1)
        image_states = [request.image_states for request in request_by_prefix.values()]
        self.prompts = Rollouts.from_lists(prompts, [], [], image_states=image_states)
        lengths = attention_mask.sum(1)
        index = attention_mask.cumsum(1) - 1 + ragged.starts(lengths)[:, None]
        self.prompt_tokens = torch.where(attention_mask == 1, index, lengths.sum())
        """[r, W] index of each token among the tokens of all prompts; padding has the next one."""
        self.ahead = torch.tensor([[states.ahead if states else 0] for states in image_states], device=device)
        """[r, 1] what is added to the positions of sampled tokens."""

        # The prompts are read piece by piece, and then copied to the rows of their completions.
        size = self.width if max_tokens is None else max(1, max_tokens // len(ids))
        for start in range(0, self.width, size):
            self._forward(ids[:, start : start + size], min(start + size, self.width))
        self.token = self._take([row_by_prefix[request.prefix] for request in requests])

    def decode(self, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """Samples up to `count` tokens per row. Returns the tokens and their log-probs, row by row."""
        columns = []
        for _ in range(min(count, self.sampling.max_new_tokens - self.num_sampled)):
            if self.num_sampled:
                self._forward(self.token[:, None], self.width + self.num_sampled)
            self.token, logp = sample_tokens(self.logits, self.uniform[:, self.num_sampled], self.sampling)
            self.num_sampled += 1
            columns.append((self.token, logp))
        tokens, logps = (torch.stack(column, 1).tolist() for column in zip(*columns, strict=True))
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
        self.ahead = self.ahead[index]
        return index

    def _forward(self, ids: Tensor, length: int) -> None:
        """Passes on [r, T] tokens, whose columns end at `length`; sets the logits [r, V] of the next token."""
        mask = self.mask[:, :length]
        position = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        # The cache of Mamba and its like has no columns: the mask is for the new tokens alone.
        is_recurrent = self.policy.model._is_stateful and not self.takes_position
        if self.cache_name == "cache_params" or is_recurrent:
            mask = mask[:, -ids.shape[1] :]
        is_prompt = length <= self.width
        inputs: dict[str, Any] = {"input_ids": ids, self.cache_name: self.cache, "attention_mask": mask}
        if self.takes_position:
            inputs["position_ids"] = position if is_prompt else position + self.ahead
        if is_prompt and self.prompts.image_states:
            tokens = self.prompt_tokens[:, length - ids.shape[1] : length]
            inputs |= decoder_inputs(self.policy.trunk, ids, tokens, self.prompts)
        output = self.policy.trunk(use_cache=True, **inputs)
        self.logits = self.policy.logits(output.last_hidden_state[:, -1])
        self.cache = output[self.cache_name]
