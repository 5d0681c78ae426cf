"""Completions that are decoded together, from their prompts to their last tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, draw
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.maths import ragged
from grpo_lightning.plugins.compute.fast.attention import additive
from grpo_lightning.plugins.engines.native.kept_rows import KeptRows
from grpo_lightning.plugins.engines.native.kv_memory import READ_TOKENS
from grpo_lightning.plugins.engines.native.prefill import read
from grpo_lightning.plugins.engines.native.shared_prompts import SharedPrompts
from grpo_lightning.plugins.engines.native.slab import SlabLayer
from grpo_lightning.policy.architecture import cache_name
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey, Request


def groups_of(requests: Sequence[Request]) -> list[Sequence[int]]:
    """Indices of the requests with equal `token_ids`, group by group, the longest prompts first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request.token_ids), []).append(index)
    return [groups[prompt] for prompt in sorted(groups, key=len, reverse=True)]


@dataclass(eq=False)
class Batch:
    """Completions that are decoded together, a row of the cache each, until the last has ended."""

    policy: Policy  # in eval mode and with the slab's attention
    requests: Sequence[Request]  # some or all of them are decoded here
    groups: Sequence[Sequence[int]]  # indices of requests with equal `token_ids`, the longest prompts first
    sampling: Sampling
    key: RandomKey
    stops: StopStrings
    kept: KeptRows | None = None  # the rows of conversations, to continue from and to keep these; None keeps nothing
    read_tokens: int = READ_TOKENS  # tokens of prompts, padding included, that are read at once
    shares: bool = False  # the rows of a group read their prompt's keys and values where they are, instead of copies

    def __post_init__(self) -> None:
        self.cache_name = cache_name(self.policy.trunk)
        self.shared: SharedPrompts | None = None
        self.going = [*chain.from_iterable(self.groups)]  # the request of each row
        self.drawn: dict[int, tuple[list[int], list[float]]] = {index: ([], []) for index in self.going}
        self.num_sampled = 0
        own = [self.requests[index] for index in self.going]
        keys = [(one.prompt_id, one.sample, one.position, len(one.token_ids)) for one in own]
        self.keys = torch.tensor(keys, device=self.policy.device)
        """[r, 4] int64 prompt id, sample, position of the first new token, and length of the prompt."""
        self.width = max(len(one.token_ids) for one in own)
        plain = plain_layers(self.policy)
        self.num_layers, self.windows = len(plain), any(layer.is_sliding for layer in plain)
        self.layers: list[SlabLayer] = []
        self.logits = torch.empty(0)  # [r, V] of the next tokens
        self.mask: Tensor | None = None
        """The padding between prompt and completion, filled or not; None without any. It is hidden by -inf in
        [r, 1, 1, C]; for windows, whose masks `slab.mask` makes, by False in [r, C]. C is a multiple of 8."""

    def decode(self, count: int) -> list[tuple[int, Completion]]:
        """Draws up to `count` tokens of each completion; returns those that have ended, and drops their rows."""
        if not self.layers:
            self.read()
        longest, seen = self.sampling.max_new_tokens, self.num_sampled
        prompt_id, sample, position, length = self.keys.unbind(1)
        uniform = uniforms(self.key, prompt_id, sample, position + seen, min(count, longest - seen))
        drawn = []
        for column in uniform.unbind(1):
            token, logp = draw(self.logits, column, self.sampling)
            drawn.append((token, logp))
            if self.num_sampled + 1 < longest:
                self._forward(token, length + self.num_sampled)
            self.num_sampled += 1
        # The one wait for the device.
        columns = (torch.stack(column, 1).tolist() for column in zip(*drawn, strict=True))
        ended: dict[int, Completion] = {}
        for index, token_ids, logps in zip(self.going, *columns, strict=True):
            own = self.drawn[index]
            own[0].extend(token_ids)
            own[1].extend(logps)
            if completion := self.stops.ended(*own, seen, longest):
                ended[index] = completion
        if self.kept:
            rows = [row for row, index in enumerate(self.going) if index in ended]
            read = self.layers[0].length - self.width
            token_ids = [self.drawn[index][0][:read] for index in ended]
            self.kept.save([self.requests[index] for index in ended], token_ids, self.layers, rows, self.width)
        self._keep([row for row, index in enumerate(self.going) if index not in ended])
        return [*ended.items()]

    def read(self) -> None:
        """Reads every prompt once, and copies its keys and values to its completions, or shares them.

        Right-padded: causal attention keeps the padding out of sight, and decoding masks its columns.
        """
        device = self.policy.device
        groups = [[self.requests[index] for index in group] for group in self.groups]
        known = [self.kept.find(group) if self.kept else None for group in groups]
        prompts = [group[0].token_ids for group in groups]
        self.layers, last = read(self.policy, prompts, known, self.num_layers, self.read_tokens)
        prompt = ragged.segments(torch.tensor([*map(len, groups)], device=device))
        self.logits = self.policy.logits(last).index_select(0, prompt)
        longest = self.sampling.max_new_tokens
        if self.shares:
            tokens = torch.tensor([*map(len, prompts)], device=device)
            self.shared = SharedPrompts([layer.slabs for layer in self.layers], tokens, prompt)
            self.layers = [SlabLayer(longest) for _ in self.layers]
            for layer, states in zip(self.layers, self.shared.layers, strict=True):
                layer.allocate(states, len(prompt))
        else:
            for layer in self.layers:
                layer.expand(prompt, self.width + longest)
            if min(map(len, prompts)) < self.width:
                # Whole rows are kept when some are dropped, so that each begins at a multiple of 8.
                column = torch.arange(-(-(self.width + longest) // 8) * 8, device=device)
                seen = (column < self.keys[:, 3, None]) | (column >= self.width)
                self.mask = seen if self.windows else additive(seen[:, None, None], self.layers[0].dtype)
        self.cache = Cache(layers=[*self.layers])

    def _forward(self, token: Tensor, position: Tensor) -> None:
        """Finds the logits that follow [r] `token` at [r] `position` in its sequence."""
        # With four dimensions it goes to the attention as it is.
        mask = None if self.mask is None else self.mask[..., : self.layers[0].length + 1]
        hidden = self.policy.hidden(
            token[:, None],
            position_ids=position[:, None],
            attention_mask=mask,
            use_cache=True,
            **{self.cache_name: self.cache},
            **({} if self.shared is None else {"shared_prompts": self.shared}),
        )
        self.logits = self.policy.logits(hidden[:, 0])

    def _keep(self, rows: list[int]) -> None:
        """Compacts everything to some rows."""
        if len(rows) == len(self.going):
            return
        self.going = [self.going[row] for row in rows]
        if not rows:
            self.layers, self.cache = [], Cache(layers=[])
            return
        index = torch.tensor(rows, device=self.keys.device)
        self.keys, self.logits = self.keys[index], self.logits[index]
        if self.mask is not None:
            self.mask = self.mask[index]
        if self.shared is not None:
            self.shared.keep(index)
        for layer in self.layers:
            layer.keep(index)


def plain_layers(policy: Policy) -> list[DynamicLayer]:
    """The layers of the model's own cache. Raises NotImplementedError if they hold more than keys and values."""
    layers = DynamicCache(config=policy.config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise NotImplementedError("its cache is not keys and values alone")
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]
