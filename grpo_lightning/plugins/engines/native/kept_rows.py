"""Keys and values of conversations between two turns, so that a turn reads only what is new."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.plugins.engines.native.slab import SlabLayer
from grpo_lightning.types import Request

MASK_ELEMENTS = 2**24  # most elements of the mask of what is read at once after kept rows


@dataclass(slots=True)
class KeptRow:
    """What a row of the cache has read."""

    token_ids: list[int]
    states: list[list[Tensor]]  # per layer [heads, tokens, head size] keys and values


class KeptRows:
    """The rows that the last call of an engine has read and drawn, one per conversation.

    A conversation is known by `prompt_id` and `sample`, and what is used of its row by the token ids alone: as far as
    they are those of the new prompt. So a history that was rewritten is read again from where it differs. Rows that a
    call does not ask for are dropped when it ends.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], KeptRow] = {}  # those of the last call, the oldest first
        self._new: dict[tuple[int, int], KeptRow] = {}
        self.limit = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return sum(len(row.token_ids) for rows in (self._rows, self._new) for row in rows.values())

    def begin(self, limit: int) -> None:
        """Begins a call: drops the oldest rows until there are at most `limit` tokens, and keeps no more from now."""
        self.limit, self._new = max(0, limit), {}
        while self._rows and self.num_tokens > self.limit:
            del self._rows[next(iter(self._rows))]

    def find(self, group: Sequence[Request]) -> tuple[KeptRow, int] | None:
        """A row that has read the longest beginning of a prompt, and its tokens; the prompt has one more at least.

        The rows of its requests are found only once.
        """
        best: tuple[KeptRow, int] | None = None
        for request in group:
            if row := self._rows.pop((request.prompt_id, request.sample), None):
                prompt = request.token_ids
                both = zip(row.token_ids, prompt[:-1], strict=False)
                ends = min(len(row.token_ids), len(prompt) - 1)
                length = next((index for index, (old, new) in enumerate(both) if old != new), ends)
                # What would need a mask that is too large is read as a whole, without any.
                if length > (best[1] if best else 0) and (len(prompt) - length) * len(prompt) <= MASK_ELEMENTS:
                    best = row, length
        return best

    def save(
        self,
        requests: Sequence[Request],
        drawn: Sequence[list[int]],
        layers: list[SlabLayer],
        rows: list[int],
        width: int,
    ) -> None:
        """Keeps rows of a slab, as far as there is room.

        `drawn` has the tokens of each row that the model has read. `rows` are indices in the slab; `width` is the
        number of its columns before the first drawn token.
        """
        room = self.limit - self.num_tokens
        for request, ids, row in zip(requests, drawn, rows, strict=True):
            room -= len(request.token_ids) + len(ids)
            if room < 0:
                return
            own = [slice(len(request.token_ids)), slice(width, width + len(ids))]
            states = [[torch.cat([slab[row, :, part] for part in own], 1) for slab in layer.slabs] for layer in layers]
            self._new[request.prompt_id, request.sample] = KeptRow([*request.token_ids, *ids], states)

    def end(self) -> None:
        """Ends a call: what it has kept is there for the next one."""
        self._rows, self._new = self._new, {}
