"""The completions that are decoded at once, and the rows of the cache that they have."""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from grpo_lightning.engines.prompt_part import Groups
from grpo_lightning.engines.slab import SlabLayer
from grpo_lightning.policy.policy import Policy


class Running:
    """Completions that have begun and not ended: a row of the cache each.

    Every row gets its next key in the same column. So rows that begin later join the others with their prompt just
    before that column, and see none of the columns before.

    Args:
        policy: What to decode with.
        rows: [r] int64, the completion that each row is of.
        layers: Keys and values of all rows.
        logits: [r, V] float32 of the next tokens.
        width: Columns of the widest prompts.
        mask: [r, C] bool, the columns of the slab that a row sees, filled or not; None sees all.
        windows: Whether the model has sliding windows.
        groups: Which rows share a prompt's keys and values; None where each has a copy.
    """

    def __init__(
        self,
        policy: Policy,
        rows: Tensor,
        layers: list[SlabLayer],
        logits: Tensor,
        width: int,
        mask: Tensor | None,
        windows: bool = False,
        groups: Groups | None = None,
    ) -> None:
        self.policy = policy
        self.rows = rows
        self.layers = layers
        self.cache = Cache(layers=list(layers))
        self.logits = logits
        self.width = width
        self.mask = mask
        self.windows = windows
        self.groups = groups
        self.ended = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        """[r] bool, whether a row has ended."""
        self.drawn = torch.zeros_like(rows)
        """[r] int64, the tokens that each row has drawn."""
        self.widths = torch.full_like(rows, width)
        """[r] int64, the columns of the prompts that each row was read with."""
        self.youngest = self.oldest = 0
        """The least and the most tokens that a row has drawn."""
        self.joined = False
        """Whether rows have begun at different columns."""

    def __len__(self) -> int:
        """Rows of the cache."""
        return len(self.rows)

    def count_drawn(self) -> None:
        """Notes that every row has drawn a token."""
        self.drawn += 1
        self.youngest, self.oldest = self.youngest + 1, self.oldest + 1

    def drop_ended(self) -> int:
        """Compacts everything to the rows that go on, and returns how many have ended."""
        # The one wait for the device, unless rows have joined: how many rows go on.
        going = (~self.ended).nonzero().squeeze(1)
        ended = len(self) - len(going)
        if ended:
            self.rows, self.logits, self.ended = self.rows[going], self.logits[going], self.ended[going]
            self.drawn, self.widths = self.drawn[going], self.widths[going]
        if not len(going):
            self.layers, self.cache = [], Cache(layers=[])
        elif ended:
            self._compact(going)
            if self.joined:
                extremes = [*self.drawn.aminmax(), self.widths.max()]
                self.youngest, self.oldest, self.width = torch.stack(extremes).tolist()
        return ended

    def _compact(self, rows: Tensor) -> None:
        """Keeps [r] `rows` of the cache, and the columns from the first one that they see."""
        first = 0
        if self.mask is not None:
            self.mask = self.mask[rows]
            if first := self._first_column():
                self.mask = pad(self.mask[:, first:], (0, first), value=True)
        for layer in self.layers:
            layer.keep(rows, first)
        if self.groups is not None:
            prompts, self.groups = self.groups.keep(rows)
            for layer in self.layers:
                layer.regroup(prompts, self.groups)

    def _first_column(self) -> int:
        """The first column of the slab that a row sees."""
        # The first rows see their prompts from the first column on: only rows that have joined wait for the device.
        return int(self.mask.any(0).int().argmax()) if self.joined and self.mask is not None else 0

    def tighten(self) -> None:
        """Frees the room of rows that have ended, of columns that no row sees, and of those that are not filled."""
        first, length = self._first_column(), self.layers[0].length
        self.mask = None if self.mask is None else self.mask[:, first:length]
        self.groups = None if self.groups is None else self.groups.narrow(self.width)
        for layer in self.layers:
            layer.tighten(first, self.groups)

    def join(self, other: "Running", columns: int) -> None:
        """Takes in rows that begin, behind those that go on. Both have no room.

        Args:
            other: Of the same model, which shares prompts if these do.
            columns: Room for the tokens that follow.
        """
        self.width = max(self.width, other.width)
        lengths = self.layers[0].length, other.layers[0].length
        room = columns if self.groups else self.width + columns
        masks = [running._mask_of(max(lengths)) for running in (self, other)]
        self.mask = pad(torch.cat(masks), (0, room - max(lengths)), value=True)
        if self.groups is not None:
            assert other.groups is not None
            self.groups = self.groups.join(other.groups, self._prompt_columns(), other._prompt_columns())
        other.cache.layers.clear()
        for layer in self.layers:  # Each layer frees both of its old slabs.
            layer.join(other.layers.pop(0), room, self.groups)
        self.rows, self.drawn = torch.cat([self.rows, other.rows]), torch.cat([self.drawn, other.drawn])
        self.ended, self.widths = torch.cat([self.ended, other.ended]), torch.cat([self.widths, other.widths])
        self.logits = torch.cat([self.logits, other.logits])
        self.youngest, self.joined = 0, True

    def _mask_of(self, length: int) -> Tensor:
        """[r, length] bool, what rows see whose columns end with so many."""
        own = self.layers[0].length
        mask = self.rows.new_ones(len(self), own, dtype=torch.bool) if self.mask is None else self.mask
        return pad(mask, (length - own, 0), value=False)

    def _prompt_columns(self) -> int:
        """Columns of the shared prompts."""
        prompts = self.layers[0].prompts
        return 0 if prompts is None else prompts.keys.shape[2]

    def decode(self, token: Tensor, position: Tensor) -> None:
        """Finds the logits that follow [r] `token` at [r] `position` in its sequence."""
        mask = None if self.mask is None else self.mask[:, : self.layers[0].length + 1]
        # With four dimensions it goes to the attention as it is, and only `slab.mask` knows windows.
        hidden = self.policy.hidden(
            token[:, None],
            past_key_values=self.cache,
            position_ids=position[:, None],
            attention_mask=mask if mask is None or self.windows else mask[:, None, None],
            use_cache=True,
        )
        self.logits = self.policy.logits(hidden[:, 0])
