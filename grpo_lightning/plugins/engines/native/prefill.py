"""Reads prompts: puts their keys and values into a slab, and returns the states of their last tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from grpo_lightning.maths import ragged
from grpo_lightning.maths.images import decoder_inputs
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.engines.native.kept_rows import MASK_ELEMENTS, KeptRow
from grpo_lightning.plugins.engines.native.slab import SlabLayer
from grpo_lightning.policy.architecture import cache_name
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Request


def read(
    policy: Policy,
    requests: Sequence[Request],
    kept_rows: Sequence[tuple[KeptRow, int] | None],
    num_layers: int,
    read_tokens: int,
) -> tuple[list[SlabLayer], Tensor]:
    """Returns the keys and values of P prompts, right-padded in slabs, and [P, hidden] states of their last tokens.

    Args:
        policy: In eval mode, with the slab's attention.
        requests: A request for each prompt.
        kept_rows: For each prompt a row that has read its beginning, and how many tokens of it; or None.
        num_layers: Number of slabs.
        read_tokens: Most tokens of new prompts, padding included, that are read at once.
    """
    device = policy.device
    prompts = [request.token_ids for request in requests]
    width = max(map(len, prompts))
    layers = [SlabLayer(width) for _ in range(num_layers)]

    # What kept rows have read is copied.
    starts = [entry[1] if entry else 0 for entry in kept_rows]
    for row, entry in enumerate(kept_rows):
        for layer, states in zip(layers, entry[0].states, strict=True) if entry else ():
            if not layer.is_initialized:
                layer.allocate(states, len(prompts))
            for slab, kept_states in zip(layer.slabs, states, strict=True):
                slab[row, :, : starts[row]] = kept_states[:, : starts[row]]

    # All other tokens are read, some prompts at once.
    new_ids = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
    last_states = []
    order = []
    for rows in _rows_read_at_once(starts, new_ids, width, read_tokens):
        triples = [(row, starts[row], len(new_ids[row])) for row in rows]
        slab_row, first_position, lengths = torch.tensor(triples, device=device).T
        member = ragged.segments(lengths)
        position = ragged.positions(lengths)
        num_visible = max(len(prompts[row]) for row in rows)
        continued = (slab_row, num_visible) if starts[rows[0]] else None
        targets = (slab_row[member], first_position[member] + position)
        cache = Cache(
            layers=[_PromptLayer(layer, len(prompts), targets, (member, position), continued) for layer in layers]
        )
        flat = torch.tensor([token for row in rows for token in new_ids[row]], device=device)
        ids = ragged.pad(flat, lengths)
        options: dict[str, Any] = {"input_ids": ids, "use_cache": True, cache_name(policy.trunk): cache}
        if continued:
            # A new token sees the kept tokens, and new tokens up to itself.
            column = torch.arange(num_visible, device=device)
            position_ids = first_position[:, None] + column[: max(len(new_ids[row]) for row in rows)]
            # The model may have no positions for the padding.
            options["position_ids"] = position_ids.clamp(max=num_visible - 1)
            options["attention_mask"] = (column <= position_ids[..., None])[:, None]
        options |= image_inputs(policy, ids, lengths, [requests[row] for row in rows])
        hidden = policy.hidden(**options)
        last_states.append(hidden[torch.arange(len(rows), device=device), lengths - 1])
        order += rows
    for layer in layers:
        layer.length = width
    return layers, torch.cat(last_states)[torch.tensor(order, device=device).argsort()]


def image_inputs(policy: Policy, ids: Tensor, lengths: Tensor, requests: Sequence[Request]) -> dict[str, Any]:
    """Returns the arguments of the transformer that replace [r, T] right-padded prompts; none without images."""
    image_states = [request.image_states for request in requests]
    if not any(image_states):
        return {}
    prompts = Rollouts.from_lists([request.token_ids for request in requests], [], [], image_states=image_states)
    # Padding has the next index.
    num_tokens = int(lengths.sum())
    tokens = ragged.pad(torch.arange(num_tokens, device=ids.device), lengths, num_tokens)
    return decoder_inputs(policy.trunk, ids, tokens, prompts)


def _rows_read_at_once(
    starts: list[int], new_ids: Sequence[list[int]], width: int, read_tokens: int
) -> list[list[int]]:
    """Divides prompts: new prompts by the number of their tokens, continued prompts by the size of their mask."""
    batches = []
    for is_continued, cost, limit in ((False, 1, read_tokens), (True, width, MASK_ELEMENTS)):
        rows = [row for row, start in enumerate(starts) if bool(start) is is_continued]
        batches_of_indices = ragged.token_budget([cost * len(new_ids[row]) for row in rows], limit)
        batches += [sorted(rows[index] for index in indices) for indices in batches_of_indices]
    return batches


class _PromptLayer(DynamicLayer):
    """Puts the keys and values of prompts that are read together into the slab of all prompts.

    Args:
        slab: The slab of all prompts.
        num_prompts: P.
        targets: [N] row and column in the slab of each new token.
        sources: [N] row and position of each new token among the tokens that are read together.
        continued: [r] rows in the slab, and columns that hold all of their prompts; None for new prompts.
    """

    def __init__(
        self,
        slab: SlabLayer,
        num_prompts: int,
        targets: tuple[Tensor, Tensor],
        sources: tuple[Tensor, Tensor],
        continued: tuple[Tensor, int] | None,
    ) -> None:
        super().__init__()
        self.slab = slab
        self.num_prompts = num_prompts
        self.targets = targets
        self.sources = sources
        self.continued = continued

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the states of new tokens, and returns the states of all tokens that the rows see."""
        if not self.slab.is_initialized:
            self.slab.allocate((key_states, value_states), self.num_prompts)
        slab_row, column = self.targets
        row, position = self.sources
        for slab, states in zip(self.slab.slabs, (key_states, value_states), strict=True):
            slab[slab_row, :, column] = states[row, :, position].to(slab.dtype)
        # New prompts see nothing else: causal attention keeps the padding behind them out of sight.
        if self.continued is None:
            return key_states, value_states
        rows, num_visible = self.continued
        keys, values = (slab if len(rows) == len(slab) else slab[rows] for slab in self.slab.slabs)
        return keys[:, :, :num_visible], values[:, :, :num_visible]

    def get_seq_length(self) -> int:
        """Returns 0. For continued prompts, positions and mask are arguments of the forward."""
        return 0
