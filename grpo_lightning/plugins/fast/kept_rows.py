"""Keys and values of conversations between two turns, so that a turn reads only what is new."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from grpo_lightning.maths import ragged
from grpo_lightning.plugins.fast.kv_memory import READ_TOKENS
from grpo_lightning.plugins.fast.slab import SlabLayer
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Request

MASK_ELEMENTS = 2**24
"""Most elements of the mask of what is read at once after kept rows."""


@dataclass(slots=True, eq=False)
class Block:
    """Rows that were kept together, end to end."""

    token_ids: list[list[int]]
    """What each row has read."""
    keys: list[Tensor]
    """Per layer [N, K, D], N tokens of all rows."""
    values: list[Tensor]
    """Per layer [N, K, E]."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(ids) for ids in self.token_ids]


@dataclass(slots=True)
class Known:
    """The beginning of a prompt that a kept row has read."""

    block: Block
    row: int
    length: int
    """Tokens; the prompt has one more at least."""


class KeptRows:
    """The rows that the last call of an engine has read and drawn, one per conversation.

    A conversation is known by `prompt_id` and `sample`, and what is used of its row by the token ids alone: as far as
    they are those of the new prompt. So a history that was rewritten is read again from where it differs. Rows that a
    call does not ask for are dropped when it ends, and so are all that other weights have read.
    """

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._version = 0
        self._rows: dict[tuple[int, int], tuple[Block, int]] = {}
        """Those of the last call, the oldest first."""
        self._new: dict[tuple[int, int], tuple[Block, int]] = {}
        self.limit = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are held. A block is held as long as one of its rows is."""
        blocks = {id(block): block for block, _ in chain(self._rows.values(), self._new.values())}
        return sum(map(sum, (block.lengths for block in blocks.values())))

    def begin(self, policy: Policy) -> None:
        """Begins a call that decodes with `policy` as it is now."""
        if self._policy is not policy or self._version != policy.version:
            self._policy, self._version = policy, policy.version
            self._rows = {}
        self._new = {}

    def shrink(self, limit: int) -> None:
        """Drops the oldest rows until there are at most `limit` tokens, and keeps no more from now on."""
        self.limit = max(0, limit)
        for key in [*self._rows]:
            if self.num_tokens <= self.limit:
                break
            self._rows.pop(key, None)

    def find(self, group: Sequence[Request]) -> Known | None:
        """The longest beginning of a prompt that a row of its requests has read. Their rows are found only once."""
        best: Known | None = None
        for request in group:
            block, row = self._rows.pop((request.prompt_id, request.sample), (None, 0))
            if block is None:
                continue
            prompt = request.token_ids
            length = _common(block.token_ids[row], prompt[:-1])
            # What would need a mask that is too large is read as a whole, without any.
            if length > (best.length if best else 0) and (len(prompt) - length) * len(prompt) <= MASK_ELEMENTS:
                best = Known(block, row, length)
        return best

    def save(
        self, requests: Sequence[Request], drawn: Sequence[list[int]], layers: list[SlabLayer], rows: Tensor, width: int
    ) -> None:
        """Keeps rows of a slab, as far as there is room.

        Args:
            requests: Of each row.
            drawn: The drawn tokens of each row that the model has read.
            layers: The slab.
            rows: [r] int64, in it.
            width: Its columns before the first drawn token, right-padded.
        """
        token_ids = [[*request.token_ids, *ids] for request, ids in zip(requests, drawn, strict=True)]
        room = self.limit - self.num_tokens
        count = sum(total <= room for total in accumulate(map(len, token_ids)))
        if not count:
            return
        lengths = torch.tensor([len(ids) for ids in token_ids[:count]], device=rows.device)
        padding = width - torch.tensor([len(request.token_ids) for request in requests[:count]], device=rows.device)
        row, padding, column = (
            ragged.spread(rows[:count], lengths),
            ragged.spread(padding, lengths),
            ragged.positions(lengths),
        )
        column = torch.where(column < width - padding, column, column + padding)
        block = Block(token_ids[:count], [], [])
        for layer in layers:
            keys, values = layer.at(row, column)
            block.keys.append(keys)
            block.values.append(values)
        for index, request in enumerate(requests[:count]):
            self._new[request.prompt_id, request.sample] = block, index

    def end(self) -> None:
        """Ends a call: what it has kept is there for the next one."""
        self._rows, self._new = self._new, {}


def read(policy: Policy, prompts: Sequence[list[int]], known: Sequence[Known | None]) -> tuple[list[SlabLayer], Tensor]:
    """Reads what is not known of the prompts.

    Args:
        policy: What reads, with the slab's attention.
        prompts: P token ids.
        known: The beginning of each prompt, or None; one at least is known.

    Returns:
        The prompts' keys and values, right-padded in a slab, and [P, hidden] the states of their last tokens.
    """
    device, width = policy.device, max(map(len, prompts))
    starts = [0 if one is None else one.length for one in known]
    layers = _filled(len(prompts), width, known, device)
    rest = [ids[start:] for ids, start in zip(prompts, starts, strict=True)]
    last: list[Tensor] = []
    order: list[int] = []
    for rows in _at_once(starts, [*map(len, rest)]):
        new = _NewTokens.of(rows, [starts[row] for row in rows], [len(rest[row]) for row in rows], device)
        flat = torch.tensor([token for row in rows for token in rest[row]], device=device)
        options = {} if new.from_start else new.options()
        cache = Cache(layers=[_Part(layer, new) for layer in layers])
        hidden = policy.hidden(ragged.pad(flat, new.lengths), past_key_values=cache, use_cache=True, **options)
        last.append(hidden[torch.arange(len(rows), device=device), new.lengths - 1])
        order += rows
    return layers, torch.cat(last)[torch.tensor(order, device=device).argsort()]


@dataclass(slots=True)
class _NewTokens:
    """Where tokens that are read together belong in a slab of right-padded prompts."""

    rows: Tensor
    """[r] int64 rows of the slab."""
    first: Tensor
    """[r] int64 column of each row's first new token: 0 in all of them, or in none."""
    lengths: Tensor
    """[r] int64 new tokens of each row."""
    seen: int
    """Columns that hold all of their prompts."""
    from_start: bool
    """Whether their prompts are read as a whole."""
    row: Tensor
    """[N] int64 index in `rows` of each new token."""
    index: Tensor
    """[N] int64 its index among the new tokens of its row."""

    @classmethod
    def of(cls, rows: list[int], first: list[int], lengths: list[int], device: torch.device) -> "_NewTokens":
        """Those of some rows."""
        seen = max(start + length for start, length in zip(first, lengths, strict=True))
        row, start, length = (torch.tensor(each, device=device) for each in (rows, first, lengths))
        return cls(row, start, length, seen, not any(first), ragged.segments(length), ragged.positions(length))

    def options(self) -> dict[str, Tensor]:
        """Positions and mask for the model."""
        column = torch.arange(self.seen, device=self.first.device)
        position = self.first[:, None] + column[: int(self.lengths.max())]
        # The model may have no positions for the padding.
        return {
            "position_ids": position.clamp(max=self.seen - 1),
            "attention_mask": (column <= position[..., None])[:, None],
        }


class _Part(DynamicLayer):
    """Puts the keys and values of what is read into a slab."""

    def __init__(self, slab: SlabLayer, new: _NewTokens) -> None:
        super().__init__()
        self.slab = slab
        self.new = new

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the states of new tokens, and returns all that the rows see."""
        new, both = self.new, ((self.slab.key_slab, key_states), (self.slab.value_slab, value_states))
        row, column = new.rows[new.row], (new.first[new.row] + new.index)
        for slab, states in both:
            slab[row, :, column] = states[new.row, :, new.index].to(slab.dtype)
        if new.from_start:  # Causal attention sees no padding.
            return key_states, value_states
        keys, values = (slab if len(new.rows) == len(slab) else slab[new.rows] for slab, _ in both)
        return keys[:, :, : new.seen], values[:, :, : new.seen]

    def get_seq_length(self) -> int:
        """0: where something is known, positions and mask come with the tokens."""
        return 0


def _filled(rows: int, width: int, known: Sequence[Known | None], device: torch.device) -> list[SlabLayer]:
    """A slab with what is known of each row, and zeros: attention would spread a NaN from what it does not see."""
    blocks = {id(one.block): one.block for one in known if one}
    some = next(iter(blocks.values()))
    layers = [SlabLayer.of(keys, values, rows, width) for keys, values in zip(some.keys, some.values, strict=True)]
    for block in blocks.values():
        of_block = [(index, one) for index, one in enumerate(known) if one and one.block is block]
        begins = [0, *accumulate(block.lengths)]
        lengths = torch.tensor([one.length for _, one in of_block], device=device)
        column = ragged.positions(lengths)
        row = ragged.spread(torch.tensor([index for index, _ in of_block], device=device), lengths)
        source = ragged.spread(torch.tensor([begins[one.row] for _, one in of_block], device=device), lengths) + column
        for layer, keys, values in zip(layers, block.keys, block.values, strict=True):
            layer.key_slab[row, :, column] = keys[source]
            layer.value_slab[row, :, column] = values[source]
    return layers


def _at_once(starts: list[int], lengths: list[int]) -> list[list[int]]:
    """Indices of the prompts that are read together: new ones by their tokens, others while their mask is small."""
    new = [index for index, start in enumerate(starts) if not start]
    packs = ragged.token_budget([lengths[index] for index in new], READ_TOKENS)
    parts = [sorted(new[row] for row in pack) for pack in packs]
    part: list[int] = []
    seen = 0
    for index in sorted(set(range(len(starts))) - set(new), key=lambda index: (lengths[index], index)):
        seen = max(seen, starts[index] + lengths[index])
        if part and (len(part) + 1) * lengths[index] * seen > MASK_ELEMENTS:
            parts.append(sorted(part))
            part, seen = [], starts[index] + lengths[index]
        part.append(index)
    return [*parts, sorted(part)] if part else parts


def _common(left: list[int], right: list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])
