"""Completions that are decoded by one loop: all at once, or some while others wait."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_lightning.engines.base import Finished, Progress
from grpo_lightning.engines.kept_rows import KeptRows, read
from grpo_lightning.engines.kv_memory import READ_TOKENS
from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.prompt_part import Groups, is_worth
from grpo_lightning.engines.running import Running
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.slab import SlabLayer
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.engines.waiting import Waiting
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
    """Completions that are decoded by one loop. Its tensors are indexed by completion, whether it has ended or not.

    Args:
        policy: What to decode with, in eval mode and with the slab's attention.
        groups: Requests with equal `token_ids` are one group, the longest prompts first.
        sampling: The distribution to draw from.
        key: Seed of the run and exploration step.
        stops: What ends a completion; None lets nothing end it.
        shares: Whether a group's rows share their prompt's keys and values; None decides by what is faster.
        finished: Called with each completion that has ended, and its index in the batch.
        kept: The rows of conversations, to go on from and to keep these; None keeps nothing.
        fits: The rows that fit at once, by the tokens of each. The others wait, and begin where rows have ended. None
            begins all at once, which `kept` needs.
        read_tokens: Tokens of prompts, padding included, that are read at once.
    """

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[Sequence[Request]],
        sampling: Sampling,
        key: RandomKey,
        stops: StopStrings | None,
        shares: bool | None = None,
        finished: Finished | None = None,
        kept: KeptRows | None = None,
        fits: Callable[[int], int] | None = None,
        read_tokens: int = READ_TOKENS,
    ) -> None:
        self.policy = policy
        self.requests = [*chain.from_iterable(groups)]
        self.waiting = Waiting(groups, fits, sampling.max_new_tokens)
        self.sampling = sampling
        self.key = key
        self.stops = stops
        self.shares = shares
        self.finished = finished
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

    def run(self, check_every: int, progress: Progress) -> list[Completion]:
        """Decodes until every completion has ended."""
        longest = self.sampling.max_new_tokens
        running = self.begin()
        while len(running):
            count = min(check_every, longest - running.oldest)
            uniform = self._uniforms(running, check_every)
            for index in range(count):
                token, logp = draw(running.logits, uniform[:, index], self.sampling)
                self.tokens[running.rows, running.drawn], self.logp[running.rows, running.drawn] = token, logp
                running.ended |= torch.isin(token, self.stop_ids)
                position = self.prompt_length[running.rows] + running.drawn
                running.count_drawn()
                if running.youngest < longest:
                    running.decode(token, position)
            self._look(running, count, progress)
            running = self._refilled(running)
        return self._completions()

    def begin(self) -> Running:
        """Reads the prompts of the first completions, as many as fit."""
        return self._read(self.waiting.take(0, 0), self.sampling.max_new_tokens)

    def _refilled(self, running: Running) -> Running:
        """What goes on with those that have waited, if enough rows have ended."""
        if not self.waiting:
            return running
        if not len(running):
            return self.begin()
        if parts := self.waiting.take(len(running), running.width):
            running.tighten()
            running.join(self._read(parts, 0, running.groups is not None), self.sampling.max_new_tokens)
        return running

    def _read(self, parts: Sequence[range], columns: int, shares: bool | None = None) -> Running:
        """Reads every prompt once, and copies its keys and values to its completions, or shares them.

        Right-padded: causal attention keeps the padding out of sight, and decoding masks its columns.

        Args:
            parts: The completions of each prompt.
            columns: Room for the tokens that follow.
            shares: Whether prompts are shared; None decides by what is faster.
        """
        device = self.policy.device
        prompts = [self.requests[part[0]].token_ids for part in parts]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = max(map(len, prompts))
        known = [self.kept.find([self.requests[row] for row in part]) for part in parts] if self.kept else []
        if any(known):
            layers, last = read(self.policy, prompts, known)
        else:
            layers, last = self._read_whole(prompts)
        keys = [(index, row) for index, part in enumerate(parts) for row in part]
        prompt, rows = torch.tensor(keys, device=device).unbind(1)
        logits = self.policy.logits(last).index_select(0, prompt)
        if self._shares(layers, len(rows)) if shares is None else shares:
            padded = min(map(len, prompts)) < width
            column = torch.arange(width, device=device)
            groups = Groups.of(prompt, len(last), column >= lengths[:, None, None] if padded else None)
            for layer in layers:
                layer.share(groups, columns)
            return Running(self.policy, rows, layers, logits, width, None, groups=groups)
        for layer in layers:
            layer.expand(prompt, width + columns)
        return Running(self.policy, rows, layers, logits, width, self._mask(rows, width, columns), self.windows)

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

    def _keep(self, running: Running, rows: Tensor) -> None:
        """Keeps the keys and values of [r] `rows` of the cache for the next turn."""
        assert self.kept is not None
        completions = running.rows[rows]
        drawn = self.tokens[completions, : running.layers[0].get_seq_length() - running.width].tolist()
        requests = [self.requests[index] for index in completions.tolist()]
        self.kept.save(requests, drawn, running.layers, rows, running.width)

    def _shares(self, layers: list[SlabLayer], rows: int) -> bool:
        """Whether rows see their prompt's keys and values where they are, and none is copied."""
        if self.windows:
            return False
        return all(is_worth(layer.key_slab, rows) for layer in layers) if self.shares is None else self.shares

    def _mask(self, rows: Tensor, width: int, columns: int) -> Tensor | None:
        """[r, width + columns] bool, False on the padding between prompt and completion; None without any."""
        lengths = self.prompt_length[rows]
        if bool((lengths == width).all()):
            return None
        column = torch.arange(width + columns, device=lengths.device)
        return (column < lengths[:, None]) | (column >= width)

    def _uniforms(self, running: Running, count: int) -> Tensor:
        """[r, count] random numbers for the next tokens of each row."""
        rows = running.rows
        first = self.position[rows] + running.drawn
        return uniforms(self.key, self.prompt_id[rows], self.sample[rows], first, count)

    def _look(self, running: Running, count: int, progress: Progress) -> None:
        """Drops the rows that have ended with one of the last `count` tokens, and tells of them."""
        longest = self.sampling.max_new_tokens
        if self.stops and self.stops.strings and running.youngest < longest:
            self._search(running, count)
        if running.oldest == longest:
            running.ended |= running.drawn == longest
        if self.kept:
            self._keep(running, running.ended.nonzero().squeeze(1))
        rows, over = running.rows, running.ended
        if ended := running.drop_ended():
            progress(ended)
            self._hand_over(rows, over)

    def _search(self, running: Running, count: int) -> None:
        """Marks the rows as ended whose last `count` tokens complete a stop string."""
        assert self.stops is not None
        rows, found = running.rows, []
        last = running.drawn[:, None] + torch.arange(-count, 0, device=rows.device)
        # The one wait for the device, unless a row has ended.
        for row, *new in torch.cat([rows[:, None], self.tokens[rows[:, None], last]], 1).tolist():
            seen = len(self.searched[row])
            self.searched[row] += new
            found.append(self.stops.first_end(self.searched[row], seen) is not None)
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


def plain_layers(policy: Policy) -> list[DynamicLayer]:
    """The layers of the model's own cache. Raises NotImplementedError if they hold more than keys and values."""
    layers = DynamicCache(config=policy.config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise NotImplementedError("its cache is not keys and values alone")
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]
