"""A batch of completions that are decoded together, from their prompts to their last tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_lightning.engines.philox import uniforms
from grpo_lightning.engines.sampling import Sampling, sample_tokens
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
    """Returns the indices of requests with equal `prefix`, group by group, the longest prompts first."""
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.prefix, []).append(index)
    return [groups[prefix] for prefix in sorted(groups, key=lambda prefix: len(prefix[0]), reverse=True)]


@dataclass(eq=False)
class Batch:
    """Completions that are decoded together, each in a row of the cache, until the last has ended."""

    policy: Policy
    """In eval mode, with the slab's attention."""
    requests: Sequence[Request]
    """The requests of the engine's call, some or all of which are decoded here."""
    groups: Sequence[Sequence[int]]
    """Indices of requests with equal `prefix`, the longest prompts first."""
    sampling: Sampling
    """The distribution to sample from, and the most tokens of a completion."""
    key: RandomKey
    """The random numbers of the call."""
    stops: StopStrings
    """Ends completions."""
    kept_rows: KeptRows | None = None
    """The rows of conversations, which prompts continue and ended rows are added to; None keeps nothing."""
    read_tokens: int = READ_TOKENS
    """Most tokens of prompts, padding included, that are read at once."""
    shares_prompts: bool = False
    """True if the rows of a group read the keys and values of their prompt in one place; False copies them."""

    def __post_init__(self) -> None:
        self.cache_name = cache_name(self.policy.trunk)
        self.shared_prompts: SharedPrompts | None = None
        self.request_of_row = [*chain.from_iterable(self.groups)]
        """[r] index of the request that each row is for."""
        self.sampled: dict[int, tuple[list[int], list[float]]] = {index: ([], []) for index in self.request_of_row}
        """Token ids and log-probs so far, by request."""
        self.num_sampled = 0
        """Tokens sampled so far in each row."""
        requests = [self.requests[index] for index in self.request_of_row]
        keys = [(request.prompt_id, request.sample, request.position, len(request.token_ids)) for request in requests]
        self.keys = torch.tensor(keys, device=self.policy.device)
        """[r, 4] int64 prompt id, sample, position of the first new token, and length of the prompt."""
        states_of_row = [request.image_states for request in requests]
        self.ahead = torch.tensor([states.ahead if states else 0 for states in states_of_row]).to(self.keys)
        """[r] int64 `ImageStates.ahead`: images take fewer positions than tokens."""
        self.width = max(len(request.token_ids) for request in requests)
        """Columns before the first sampled token: the length of the longest prompt."""
        model_layers = plain_layers(self.policy)
        self.num_layers = len(model_layers)
        self.has_windows = any(layer.is_sliding for layer in model_layers)
        self.layers: list[SlabLayer] = []
        self.logits = torch.empty(0)
        """[r, V] logits of the next tokens."""
        self.mask: Tensor | None = None
        """The padding between prompt and completion, filled or not; None without any. It is hidden by -inf in
        [r, 1, 1, C]; for windows, whose masks `slab.mask` makes, by False in [r, C]. C is a multiple of 8."""

    def decode(self, count: int) -> list[tuple[int, Completion]]:
        """Samples up to `count` tokens of each completion. Returns the ended completions, and drops their rows."""
        if not self.layers:
            self.read()
        max_tokens = self.sampling.max_new_tokens
        num_before = self.num_sampled
        prompt_id, sample, position, prompt_length = self.keys.unbind(1)
        uniform = uniforms(self.key, prompt_id, sample, position + num_before, min(count, max_tokens - num_before))
        steps = []
        for column in uniform.unbind(1):
            token, logp = sample_tokens(self.logits, column, self.sampling)
            steps.append((token, logp))
            if self.num_sampled + 1 < max_tokens:
                self._forward(token, prompt_length + self.ahead + self.num_sampled)
            self.num_sampled += 1

        # The one wait for the device.
        columns = (torch.stack(tensors, 1).tolist() for tensors in zip(*steps, strict=True))
        completions: dict[int, Completion] = {}
        for index, token_ids, logps in zip(self.request_of_row, *columns, strict=True):
            all_ids, all_logps = self.sampled[index]
            all_ids.extend(token_ids)
            all_logps.extend(logps)
            if completion := self.stops.ended(all_ids, all_logps, num_before, max_tokens):
                completions[index] = completion

        if self.kept_rows:
            rows = [row for row, index in enumerate(self.request_of_row) if index in completions]
            num_read = self.layers[0].length - self.width
            sampled_ids = [self.sampled[index][0][:num_read] for index in completions]
            requests = [self.requests[index] for index in completions]
            self.kept_rows.save(requests, sampled_ids, self.layers, rows, self.width)
        self._keep([row for row, index in enumerate(self.request_of_row) if index not in completions])
        return [*completions.items()]

    def read(self) -> None:
        """Reads every prompt once. Its completions share its keys and values, or get copies.

        Prompts are padded on the right. Causal attention does not see the padding, and decoding masks it.
        """
        device = self.policy.device
        groups = [[self.requests[index] for index in group] for group in self.groups]
        kept_rows = [self.kept_rows.find(group) if self.kept_rows else None for group in groups]
        prompts = [group[0] for group in groups]
        self.layers, last_states = read(self.policy, prompts, kept_rows, self.num_layers, self.read_tokens)
        prompt_of_row = ragged.segments(torch.tensor([*map(len, groups)], device=device))
        self.logits = self.policy.logits(last_states).index_select(0, prompt_of_row)

        max_tokens = self.sampling.max_new_tokens
        if self.shares_prompts:
            # The slabs of the rows hold sampled tokens alone.
            lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)
            self.shared_prompts = SharedPrompts([layer.slabs for layer in self.layers], lengths, prompt_of_row)
            self.layers = [SlabLayer(max_tokens) for _ in self.layers]
            for layer, states in zip(self.layers, self.shared_prompts.layers, strict=True):
                layer.allocate(states, len(prompt_of_row))
        else:
            for layer in self.layers:
                layer.expand(prompt_of_row, self.width + max_tokens)
            if min(len(prompt.token_ids) for prompt in prompts) < self.width:
                # A multiple of 8, so that each row of the mask begins at one, also when rows are dropped.
                column = torch.arange(-(-(self.width + max_tokens) // 8) * 8, device=device)
                is_token = (column < self.keys[:, 3, None]) | (column >= self.width)
                self.mask = is_token if self.has_windows else additive(is_token[:, None, None], self.layers[0].dtype)
        self.cache = Cache(layers=[*self.layers])

    def _forward(self, token: Tensor, position: Tensor) -> None:
        """Computes the logits after [r] `token`, which stands at [r] `position` of its sequence."""
        # A mask of four dimensions reaches the attention unchanged.
        mask = None if self.mask is None else self.mask[..., : self.layers[0].length + 1]
        hidden = self.policy.hidden(
            token[:, None],
            position_ids=position[:, None],
            attention_mask=mask,
            use_cache=True,
            **{self.cache_name: self.cache},
            **({} if self.shared_prompts is None else {"shared_prompts": self.shared_prompts}),
        )
        self.logits = self.policy.logits(hidden[:, 0])

    def _keep(self, rows: list[int]) -> None:
        """Drops all but some rows."""
        if len(rows) == len(self.request_of_row):
            return
        self.request_of_row = [self.request_of_row[row] for row in rows]
        if not rows:
            self.layers = []
            self.cache = Cache(layers=[])
            return
        index = torch.tensor(rows, device=self.keys.device)
        self.keys = self.keys[index]
        self.ahead = self.ahead[index]
        self.logits = self.logits[index]
        if self.mask is not None:
            self.mask = self.mask[index]
        if self.shared_prompts is not None:
            self.shared_prompts.keep(index)
        for layer in self.layers:
            layer.keep(index)


def plain_layers(policy: Policy) -> list[DynamicLayer]:
    """Returns the layers of transformers' cache; raises NotImplementedError if they hold more than keys and values."""
    layers = DynamicCache(config=policy.config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise NotImplementedError("its cache is not keys and values alone")
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]
