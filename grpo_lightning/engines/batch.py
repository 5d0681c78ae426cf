"""Completions that are decoded together, and the rows of the cache that they have."""

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_lightning.engines.base import Finished, Progress
from grpo_lightning.engines.graphs import Graphs
from grpo_lightning.engines.kept_rows import KeptRows, read
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.prompt_part import Groups, is_worth
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.slab import SlabLayer
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.maths import ragged
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request


def groups_of(requests: Sequence[Request]) -> list[Sequence[int]]:
    """Indices of the requests with equal `token_ids`, group by group, the longest prompts first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request.token_ids), []).append(index)
    return [groups[prompt] for prompt in sorted(groups, key=len, reverse=True)]


def chosen(requests: Sequence[Request], groups: Sequence[Sequence[int]]) -> list[list[Request]]:
    """The requests whose indices `groups` holds."""
    return [[requests[index] for index in group] for group in groups]


def in_order(groups: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[Completion]:
    """Completions of groups of indices, sorted by index."""
    indices = chain.from_iterable(groups)
    return [completion for _, completion in sorted(zip(indices, completions, strict=True), key=itemgetter(0))]


def of_requests(groups: Sequence[Sequence[int]], finished: Finished | None) -> Finished | None:
    """`finished`, called with indices into a batch of `groups` instead of indices of requests."""
    indices = [*chain.from_iterable(groups)]
    return None if finished is None else lambda row, completion: finished(indices[row], completion)


class Batch:
    """Completions that are decoded together. Its tensors are indexed by completion, whether it has ended or not.

    Args:
        policy: What to decode with, in eval mode and with the slab's attention.
        groups: Requests with equal `token_ids` are one group.
        sampling: The distribution to draw from.
        key: Seed of the run and exploration step.
        stops: What ends a completion; None lets nothing end it.
        shares: Whether a group's rows share their prompt's keys and values; None decides by what is faster.
        graphs: Captured steps to decode with.
    """

    finished: Finished | None = None
    """Called with each completion that has ended, and its index in the batch."""
    kept: KeptRows | None = None
    """The rows of conversations, to go on from and to keep these; None keeps nothing."""

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[Sequence[Request]],
        sampling: Sampling,
        key: RandomKey,
        stops: StopStrings | None,
        shares: bool | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.policy = policy
        self.groups = groups
        self.sampling = sampling
        self.key = key
        self.stops = stops
        self.shares = shares
        self.graphs = graphs
        device = policy.device
        prompts = [group[0].token_ids for group in groups]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        flat = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        self.input_ids, self.input_lengths = ragged.pad(flat, lengths), lengths
        keys = [(index, r.prompt_id, r.sample, r.position) for index, group in enumerate(groups) for r in group]
        self.prompt, self.prompt_id, self.sample, self.position = torch.tensor(keys, device=device).unbind(1)
        self.prompt_length = lengths[self.prompt]
        self.stop_ids = torch.tensor(sorted(stops.ids if stops else ()), dtype=torch.int64, device=device)
        shape = (len(keys), sampling.max_new_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logp = torch.zeros(shape, dtype=torch.float32, device=device)
        self.drawn: list[list[int]] = [[] for _ in keys]
        """What was searched for stop strings of each completion so far."""

    def run(self, check_every: int, progress: Progress) -> list[Completion]:
        """Decodes until every completion has ended."""
        running = self.prefill()
        uniform = torch.empty(0)
        for index in range(self.sampling.max_new_tokens):
            if index % check_every == 0:
                if self.stops and self.stops.strings and index:
                    self._search(running, index - check_every, index)
                if self.kept and index:
                    self._keep(running, running.ended.nonzero().squeeze(1))
                rows, over = running.rows, running.ended
                if ended := running.drop_ended():
                    progress(ended)
                    self._hand_over(rows, over)
                if not len(running):
                    break
                uniform = self._uniforms(running.rows, index, check_every)
            token, logp = draw(running.logits, uniform[:, index % check_every], self.sampling)
            self.tokens[running.rows, index], self.logp[running.rows, index] = token, logp
            running.ended |= torch.isin(token, self.stop_ids)
            if index + 1 < self.sampling.max_new_tokens:
                running.decode(token, self.prompt_length[running.rows] + index)
        else:
            if self.kept:
                self._keep(running, torch.arange(len(running), device=running.rows.device))
        progress(len(running))
        completions = self._completions()
        if self.finished:
            for row in running.rows.tolist():
                self.finished(row, completions[row])
        return completions

    def prefill(self) -> "Running":
        """Reads every prompt once, and copies its keys and values to its completions.

        Right-padded: causal attention keeps the padding out of sight, and decoding masks its columns.
        """
        width = self.input_ids.shape[1]
        known = [self.kept.find(group) for group in self.groups] if self.kept else []
        if any(known):
            layers, last = read(self.policy, [group[0].token_ids for group in self.groups], known)
            cache = Cache(layers=list(layers))
        else:
            layers = [SlabLayer(width) for _ in plain_layers(self.policy)]
            cache = Cache(layers=list(layers))
            hidden = self.policy.hidden(self.input_ids, past_key_values=cache, use_cache=True)
            last = hidden[torch.arange(len(hidden), device=hidden.device), self.input_lengths - 1]
        logits = self.policy.logits(last).index_select(0, self.prompt)
        if self.graphs is not None:
            self.graphs.start(layers, self.prompt, self.prompt_length, self.sampling.max_new_tokens)
            return Running(self.policy, Cache(layers=[]), [], logits, None, None, self.graphs)
        if self._shares(layers):
            padded = bool((self.input_lengths < width).any())
            column = torch.arange(width, device=last.device)
            padding = column >= self.input_lengths[:, None, None] if padded else None
            groups = Groups.of(self.prompt, len(last), padding)
            for layer in layers:
                layer.share(groups, self.sampling.max_new_tokens)
            return Running(self.policy, cache, layers, logits, None, groups)
        for layer in layers:
            layer.expand(self.prompt, width + self.sampling.max_new_tokens)
        return Running(self.policy, cache, layers, logits, self._mask())

    def _keep(self, running: "Running", rows: Tensor) -> None:
        """Keeps the keys and values of [r] `rows` of the cache for the next turn."""
        assert self.kept is not None
        completions, width = running.rows[rows], self.input_ids.shape[1]
        requests = [*chain.from_iterable(self.groups)]
        drawn = self.tokens[completions, : running.layers[0].get_seq_length() - width].tolist()
        self.kept.save([requests[index] for index in completions.tolist()], drawn, running.layers, rows, width)

    def _shares(self, layers: list[SlabLayer]) -> bool:
        """Whether rows see their prompt's keys and values where they are, and none is copied."""
        if any(layer.is_sliding for layer in plain_layers(self.policy)):
            return False
        return (
            all(is_worth(layer.key_slab, len(self.prompt)) for layer in layers) if self.shares is None else self.shares
        )

    def _mask(self) -> Tensor | None:
        """[B, width + max_new_tokens] bool, False on the padding between prompt and completion; None without any."""
        width = self.input_ids.shape[1]
        if bool((self.prompt_length == width).all()):
            return None
        column = torch.arange(width + self.sampling.max_new_tokens, device=self.prompt_length.device)
        mask = (column < self.prompt_length[:, None]) | (column >= width)
        windows = any(layer.is_sliding for layer in plain_layers(self.policy))
        # With four dimensions it goes to the attention as it is, and only `slab.mask` knows windows.
        return mask if windows else mask[:, None, None]

    def _uniforms(self, rows: Tensor, first: int, count: int) -> Tensor:
        """[r, count] random numbers of the completions `rows`, for their drawn tokens from index `first` on."""
        return uniforms(self.key, self.prompt_id[rows], self.sample[rows], self.position[rows] + first, count)

    def _search(self, running: "Running", first: int, end: int) -> None:
        """Marks the rows as ended whose tokens from index `first` on complete a stop string."""
        assert self.stops is not None
        rows, found = running.rows, []
        # The one wait for the device, unless a row has ended.
        for row, *new in torch.cat([rows[:, None], self.tokens[rows, first:end]], 1).tolist():
            self.drawn[row] += new
            found.append(self.stops.first_end(self.drawn[row], first) is not None)
        if any(found):
            running.ended |= torch.tensor(found, device=rows.device)

    def _hand_over(self, rows: Tensor, over: Tensor) -> None:
        """Calls `finished` with those of [r] `rows` that are `over`."""
        if self.finished:
            for row, completion in zip(rows[over].tolist(), self._completions(rows[over]), strict=True):
                self.finished(row, completion)

    def _completions(self, rows: Tensor | slice = slice(None)) -> list[Completion]:
        """What was drawn of some rows, each completion up to its first stop token or string."""
        drawn, logps = self.tokens[rows], self.logp[rows]
        stops = torch.isin(drawn, self.stop_ids)
        # A row that never stopped has all its tokens; the others end with their first stop token.
        stopped = stops.any(1)
        lengths = torch.where(stopped, stops.int().argmax(1) + 1, self.sampling.max_new_tokens).tolist()
        completions = [
            Completion(tokens[:length], logp[:length], FinishReason.STOP if stop else FinishReason.LENGTH)
            for tokens, logp, length, stop in zip(
                drawn.tolist(), logps.tolist(), lengths, stopped.tolist(), strict=True
            )
        ]
        return [self.stops.cut(completion) for completion in completions] if self.stops else completions


class Running:
    """The completions of a batch that have not ended: a row of the cache each.

    Args:
        policy: What to decode with.
        cache: Keys and values of all rows.
        layers: Those of `cache`.
        logits: [B, V] float32 of the next tokens.
        mask: As `Batch` makes it.
        groups: Which rows share a prompt's keys and values; None where each has a copy.
        graphs: Captured steps, which have the cache and the mask; None without.
    """

    def __init__(
        self,
        policy: Policy,
        cache: Cache,
        layers: list[SlabLayer],
        logits: Tensor,
        mask: Tensor | None,
        groups: Groups | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.policy = policy
        self.cache = cache
        self.layers = layers
        self.logits = logits
        self.mask = mask
        self.groups = groups
        self.graphs = graphs
        self.rows = torch.arange(len(logits), device=logits.device)
        """[r] int64, the completion that each row is of."""
        self.ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        """[r] bool, whether a row has drawn a stop token."""

    def __len__(self) -> int:
        """Rows of the cache."""
        return len(self.rows)

    def drop_ended(self) -> int:
        """Compacts everything to the rows that go on, and returns how many have ended."""
        # The one wait for the device: how many rows go on.
        going = (~self.ended).nonzero().squeeze(1)
        ended = len(self) - len(going)
        if ended:
            self.rows, self.logits, self.ended = self.rows[going], self.logits[going], self.ended[going]
        if ended and len(going):
            self.mask = None if self.mask is None else self.mask[going]
            for layer in self.layers:
                layer.keep(going)
            if self.graphs is not None:
                self.graphs.keep(going)
            if self.groups is not None:
                prompts, self.groups = self.groups.keep(going)
                for layer in self.layers:
                    layer.regroup(prompts, self.groups)
        return ended

    def decode(self, token: Tensor, position: Tensor) -> None:
        """Finds the logits that follow [r] `token` at [r] `position` in its sequence."""
        if self.graphs is not None:
            self.logits = self.graphs.decode(token, position)
            return
        length = self.layers[0].length + 1
        hidden = self.policy.hidden(
            token[:, None],
            past_key_values=self.cache,
            position_ids=position[:, None],
            attention_mask=None if self.mask is None else self.mask[..., :length],
            use_cache=True,
        )
        self.logits = self.policy.logits(hidden[:, 0])


def plain_layers(policy: Policy) -> list[DynamicLayer]:
    """The layers of the model's own cache. Raises NotImplementedError if they hold more than keys and values."""
    layers = DynamicCache(config=policy.config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise NotImplementedError("its cache is not keys and values alone")
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]
