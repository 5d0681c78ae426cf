"""Completions that are decoded together, from their prompts to their last tokens."""

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.maths import ragged
from grpo_lightning.plugins.fast.kept_rows import KeptRows, read
from grpo_lightning.plugins.fast.kv_memory import READ_TOKENS
from grpo_lightning.plugins.fast.prompt_part import Groups, is_worth
from grpo_lightning.plugins.fast.rows import Rows
from grpo_lightning.plugins.fast.slab import SlabLayer
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request


def groups_of(requests: Sequence[Request]) -> list[Sequence[int]]:
    """Indices of the requests with equal `token_ids`, group by group, the longest prompts first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request.token_ids), []).append(index)
    return [groups[prompt] for prompt in sorted(groups, key=len, reverse=True)]


class Batch:
    """Completions that are decoded together. Its tensors are indexed by completion, whether it has ended or not.

    Args:
        policy: What to decode with, in eval mode and with the slab's attention.
        requests: Some or all of them are decoded here.
        groups: Indices of requests with equal `token_ids`, group by group, the longest prompts first.
        sampling: The distribution to draw from.
        key: Seed of the run and exploration step.
        stops: What ends a completion; None lets nothing end it.
        shares: Whether a group's rows share their prompt's keys and values; None decides by what is faster.
        kept: The rows of conversations, to continue from and to keep these; None keeps nothing.
        read_tokens: Tokens of prompts, padding included, that are read at once.
    """

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[Request],
        groups: Sequence[Sequence[int]],
        sampling: Sampling,
        key: RandomKey,
        stops: StopStrings | None,
        shares: bool | None = None,
        kept: KeptRows | None = None,
        read_tokens: int = READ_TOKENS,
    ) -> None:
        self.policy = policy
        self.indices = [*chain.from_iterable(groups)]
        """Of each completion's request."""
        self.requests = [requests[index] for index in self.indices]
        self.sizes = [*map(len, groups)]
        self.sampling = sampling
        self.key = key
        self.stops = stops
        self.shares = shares
        self.kept = kept
        self.read_tokens = read_tokens
        plain = plain_layers(policy)
        self.num_layers, self.windows = len(plain), any(layer.is_sliding for layer in plain)
        device = policy.device
        keys = [(r.prompt_id, r.sample, r.position, len(r.token_ids)) for r in self.requests]
        self.prompt_id, self.sample, self.position, self.prompt_length = torch.tensor(keys, device=device).unbind(1)
        self.stop_ids = torch.tensor(sorted(stops.ids if stops else ()), dtype=torch.int64, device=device)
        shape = (len(keys), sampling.max_new_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logp = torch.zeros(shape, dtype=torch.float32, device=device)
        self.searched: list[list[int]] = [[] for _ in keys]
        """What was searched for stop strings of each completion so far."""
        self.rows: Rows | None = None
        """The completions that have not ended; None before their prompts are read."""

    @property
    def has_ended(self) -> bool:
        """Whether every completion has ended."""
        return self.rows is not None and not len(self.rows)

    def decode(self, count: int) -> list[tuple[int, Completion]]:
        """Draws up to `count` tokens of each completion, and returns the completions that have ended."""
        if self.rows is None:
            self.rows = self._read()
        rows, longest = self.rows, self.sampling.max_new_tokens
        count = min(count, longest - rows.num_drawn)
        uniform = self._uniforms(rows, count)
        for index in range(count):
            token, logp = draw(rows.logits, uniform[:, index], self.sampling)
            self.tokens[rows.indices, rows.num_drawn], self.logp[rows.indices, rows.num_drawn] = token, logp
            rows.ended |= torch.isin(token, self.stop_ids)
            position = self.prompt_length[rows.indices] + rows.num_drawn
            rows.num_drawn += 1
            if rows.num_drawn < longest:
                rows.decode(token, position)
        if rows.num_drawn == longest:
            rows.ended.fill_(True)
        elif self.stops and self.stops.strings:
            self._search(rows, count)
        if self.kept:
            self._keep(rows)
        return self._completions(rows.drop_ended())

    def _read(self) -> Rows:
        """Reads every prompt once, and copies its keys and values to its completions, or shares them.

        Right-padded: causal attention keeps the padding out of sight, and decoding masks its columns.
        """
        device, columns = self.policy.device, self.sampling.max_new_tokens
        begins = [*accumulate(self.sizes, initial=0)]
        groups = [self.requests[begin : begin + size] for begin, size in zip(begins, self.sizes, strict=False)]
        prompts = [group[0].token_ids for group in groups]
        width = max(map(len, prompts))
        known = [self.kept.find(group) for group in groups] if self.kept else []
        layers, last = read(self.policy, prompts, known) if any(known) else self._read_whole(prompts)
        indices = torch.arange(len(self.requests), device=device)
        prompt = ragged.segments(torch.tensor(self.sizes, device=device))
        logits = self.policy.logits(last).index_select(0, prompt)
        if self._shares(layers):
            lengths = torch.tensor([*map(len, prompts)], device=device)
            padded = min(map(len, prompts)) < width
            column = torch.arange(width, device=device)
            sharing = Groups.of(prompt, len(prompts), column >= lengths[:, None, None] if padded else None)
            for layer in layers:
                layer.share(sharing, columns)
            return Rows(self.policy, indices, layers, logits, width, None, groups=sharing)
        for layer in layers:
            layer.expand(prompt, width + columns)
        return Rows(self.policy, indices, layers, logits, width, self._mask(width, columns), self.windows)

    def _read_whole(self, prompts: Sequence[list[int]]) -> tuple[list[SlabLayer], Tensor]:
        """Keys and values of prompts, right-padded, and [P, hidden] the states of their last tokens."""
        first, *others = ragged.token_budget([*map(len, prompts)], self.read_tokens)
        # The longest come first, in the order that they have.
        layers = [SlabLayer(len(prompts[0])) for _ in range(self.num_layers)]
        last = [self._read_into(layers, prompts[: len(first)])]
        if others:
            layers = [layer.grown(len(prompts)) for layer in layers]
        for pack in others:
            rows = slice(pack[0], pack[-1] + 1)
            last.append(self._read_into([layer.of_rows(rows) for layer in layers], prompts[rows]))
        return layers, torch.cat(last)

    def _read_into(self, layers: Sequence[SlabLayer], prompts: Sequence[list[int]]) -> Tensor:
        """[P, hidden] the states of the prompts' last tokens; all are read at once, into empty layers."""
        device = self.policy.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        flat = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        cache = Cache(layers=list(layers))
        hidden = self.policy.hidden(ragged.pad(flat, lengths), past_key_values=cache, use_cache=True)
        return hidden[torch.arange(len(hidden), device=device), lengths - 1]

    def _keep(self, rows: Rows) -> None:
        """Keeps the keys and values of the rows that have ended for the next turn."""
        assert self.kept is not None
        ended = rows.ended.nonzero().squeeze(1)
        completions = rows.indices[ended]
        drawn = self.tokens[completions, : rows.layers[0].get_seq_length() - rows.width].tolist()
        requests = [self.requests[index] for index in completions.tolist()]
        self.kept.save(requests, drawn, rows.layers, ended, rows.width)

    def _shares(self, layers: list[SlabLayer]) -> bool:
        """Whether rows see their prompt's keys and values where they are, and none is copied."""
        if self.windows:
            return False
        if self.shares is None:
            return all(is_worth(layer.key_slab, len(self.requests)) for layer in layers)
        return self.shares

    def _mask(self, width: int, columns: int) -> Tensor | None:
        """[B, width + columns] bool, False on the padding between prompt and completion; None without any."""
        lengths = self.prompt_length
        if bool((lengths == width).all()):
            return None
        column = torch.arange(width + columns, device=lengths.device)
        return (column < lengths[:, None]) | (column >= width)

    def _uniforms(self, rows: Rows, count: int) -> Tensor:
        """[r, count] random numbers for the next tokens of each row."""
        indices = rows.indices
        first = self.position[indices] + rows.num_drawn
        return uniforms(self.key, self.prompt_id[indices], self.sample[indices], first, count)

    def _search(self, rows: Rows, count: int) -> None:
        """Marks the rows as ended whose last `count` tokens complete a stop string."""
        assert self.stops is not None
        ended = []
        new_tokens = self.tokens[rows.indices, rows.num_drawn - count : rows.num_drawn]
        # The one wait for the device, unless a row has ended.
        for index, *new in torch.cat([rows.indices[:, None], new_tokens], 1).tolist():
            seen = len(self.searched[index])
            self.searched[index] += new
            ended.append(self.stops.first_end(self.searched[index], seen) is not None)
        if any(ended):
            rows.ended |= torch.tensor(ended, device=rows.ended.device)

    def _completions(self, indices: Tensor) -> list[tuple[int, Completion]]:
        """Indices of requests, and their completions that have ended, up to the first stop token or string."""
        if not len(indices):
            return []
        # One wait for the device: the bits of log-probs travel with the tokens.
        bits = self.logp[indices].view(torch.int32).long()
        index, tokens, bits = (
            torch.cat([indices[:, None], self.tokens[indices], bits], 1).cpu().split([1, *self.tokens.shape[1:] * 2], 1)
        )
        stops = torch.isin(tokens, torch.tensor(sorted(self.stops.ids if self.stops else ()), dtype=torch.int64))
        # A row that never stopped has all its tokens; the others end with their first stop token.
        stopped = stops.any(1)
        lengths = torch.where(stopped, stops.int().argmax(1) + 1, self.sampling.max_new_tokens)
        rows = zip(
            tokens.tolist(), bits.int().view(torch.float32).tolist(), lengths.tolist(), stopped.tolist(), strict=True
        )
        completions = [
            Completion(ids[:length], logp[:length], FinishReason.STOP if stop else FinishReason.LENGTH)
            for ids, logp, length, stop in rows
        ]
        cut = [self.stops.cut(completion) for completion in completions] if self.stops else completions
        return [(self.indices[row], completion) for row, completion in zip(index[:, 0].tolist(), cut, strict=True)]


def plain_layers(policy: Policy) -> list[DynamicLayer]:
    """The layers of the model's own cache. Raises NotImplementedError if they hold more than keys and values."""
    layers = DynamicCache(config=policy.config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise NotImplementedError("its cache is not keys and values alone")
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]
