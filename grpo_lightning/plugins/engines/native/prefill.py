"""Reading prompts: their keys and values into a slab, and the states of their last tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from grpo_lightning.maths import ragged
from grpo_lightning.plugins.engines.native.kept_rows import MASK_ELEMENTS, KeptRow
from grpo_lightning.plugins.engines.native.slab import SlabLayer
from grpo_lightning.policy.architecture import cache_name
from grpo_lightning.policy.policy import Policy


def read(
    policy: Policy,
    prompts: Sequence[list[int]],
    known: Sequence[tuple[KeptRow, int] | None],
    num_layers: int,
    read_tokens: int,
) -> tuple[list[SlabLayer], Tensor]:
    """Keys and values of P prompts, right-padded in a slab, and [P, hidden] the states of their last tokens.

    The policy is in eval mode and has the slab's attention. What is `known` is the row that has read the beginning of a
    prompt, and how many tokens of it. At most `read_tokens` of new prompts, padding included, are read at once.
    """
    device, width = policy.device, max(map(len, prompts))
    layers = [SlabLayer(width) for _ in range(num_layers)]
    starts = [one[1] if one else 0 for one in known]
    for row, one in enumerate(known):
        for layer, states in zip(layers, one[0].states, strict=True) if one else ():
            if not layer.is_initialized:
                layer.allocate(states, len(prompts))
            for slab, kept in zip(layer.slabs, states, strict=True):
                slab[row, :, : starts[row]] = kept[:, : starts[row]]
    rest = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
    last, order = [], []
    for rows in _packs(starts, rest, width, read_tokens):
        row, first, lengths = torch.tensor([(row, starts[row], len(rest[row])) for row in rows], device=device).T
        seen = max(len(prompts[row]) for row in rows)
        index, position = ragged.segments(lengths), ragged.positions(lengths)
        places = (row[index], first[index] + position), (index, position)
        after = (row, seen) if starts[rows[0]] else None
        cache = Cache(layers=[_PackLayer(layer, len(prompts), *places, after) for layer in layers])
        options: dict[str, Any] = {cache_name(policy.trunk): cache}
        if after:
            column = torch.arange(seen, device=device)
            position_ids = first[:, None] + column[: max(len(rest[row]) for row in rows)]
            # The model may have no positions for the padding.
            options["position_ids"] = position_ids.clamp(max=seen - 1)
            options["attention_mask"] = (column <= position_ids[..., None])[:, None]
        flat = torch.tensor([token for row in rows for token in rest[row]], device=device)
        hidden = policy.hidden(ragged.pad(flat, lengths), use_cache=True, **options)
        last.append(hidden[torch.arange(len(rows), device=device), lengths - 1])
        order += rows
    for layer in layers:
        layer.length = width
    return layers, torch.cat(last)[torch.tensor(order, device=device).argsort()]


def _packs(starts: list[int], rest: Sequence[list[int]], width: int, read_tokens: int) -> list[list[int]]:
    """Prompts that are read together: new ones by their tokens, others while their mask is small."""
    micro_batches = []
    for begun, cost, limit in ((False, 1, read_tokens), (True, width, MASK_ELEMENTS)):
        rows = [row for row, start in enumerate(starts) if bool(start) is begun]
        budget = ragged.token_budget([cost * len(rest[row]) for row in rows], limit)
        micro_batches += [sorted(rows[index] for index in micro_batch) for micro_batch in budget]
    return micro_batches


class _PackLayer(DynamicLayer):
    """Puts the keys and values of what is read together into the slab of all prompts.

    Args:
        slab: Of all prompts.
        num_prompts: P.
        into: [N] row and column in the slab of each new token.
        source: [N] row and position of each new token among those read together.
        after: [r] rows in the slab, and columns that hold all of their prompts; None where prompts are read whole.
    """

    def __init__(
        self,
        slab: SlabLayer,
        num_prompts: int,
        into: tuple[Tensor, Tensor],
        source: tuple[Tensor, Tensor],
        after: tuple[Tensor, int] | None,
    ) -> None:
        super().__init__()
        self.slab, self.num_prompts, self.into, self.source, self.after = slab, num_prompts, into, source, after

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the states of new tokens, and returns all that the rows see."""
        if not self.slab.is_initialized:
            self.slab.allocate((key_states, value_states), self.num_prompts)
        (row, column), (index, position) = self.into, self.source
        for slab, states in zip(self.slab.slabs, (key_states, value_states), strict=True):
            slab[row, :, column] = states[index, :, position].to(slab.dtype)
        if self.after is None:  # Causal attention sees no padding.
            return key_states, value_states
        rows, seen = self.after
        keys, values = (slab if len(rows) == len(slab) else slab[rows] for slab in self.slab.slabs)
        return keys[:, :, :seen], values[:, :, :seen]

    def get_seq_length(self) -> int:
        """0: where something is known, positions and mask come with the tokens."""
        return 0
