"""Keys and values of conversations, kept from turn to turn, so that a turn reads only new tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.plugins.engines.native.slab import SlabLayer
from grpo_lightning.types import Request

MASK_ELEMENTS = 2**24
"""Most elements of the mask for the tokens that are read at once after kept rows."""


@dataclass(slots=True)
class KeptRow:
    """The tokens that a row of the cache has read, with their keys and values."""

    token_ids: list[int]
    """The tokens, from the first of the conversation."""
    states: list[list[Tensor]]
    """Per layer [heads, tokens, head size] keys and values."""


class KeptRows:
    """The rows of an engine's last call, one per conversation.

    A row is found by `prompt_id` and `sample`. It is used as far as its tokens equal the tokens of the new prompt. So a
    rewritten history is read again from where it differs. Rows that a call does not use are dropped at its end.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], KeptRow] = {}
        """Rows of the last call, the oldest first."""
        self._new: dict[tuple[int, int], KeptRow] = {}
        """Rows of the current call."""
        self.limit = 0
        """Most tokens to hold."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return sum(len(row.token_ids) for rows in (self._rows, self._new) for row in rows.values())

    def begin(self, limit: int) -> None:
        """Begins a call: sets the limit, and drops the oldest rows that exceed it."""
        self.limit = max(0, limit)
        self._new = {}
        while self._rows and self.num_tokens > self.limit:
            del self._rows[next(iter(self._rows))]

    def find(self, group: Sequence[Request]) -> tuple[KeptRow, int] | None:
        """Returns the row that has read the longest beginning of a prompt, and the number of tokens to use of it.

        At least the last token of the prompt is left to read. A row is found only once.

        Args:
            group: Requests with equal `prefix`.
        """
        best: tuple[KeptRow, int] | None = None
        for request in group:
            if row := self._rows.pop((request.prompt_id, request.sample), None):
                prompt = request.token_ids
                pairs = [*zip(row.token_ids, prompt[:-1], strict=False)]
                length = next((index for index, (old, new) in enumerate(pairs) if old != new), len(pairs))
                # If the mask would be too large, the prompt is read as a whole, which takes no mask.
                if length > (best[1] if best else 0) and (len(prompt) - length) * len(prompt) <= MASK_ELEMENTS:
                    best = row, length
        return best

    def save(
        self,
        requests: Sequence[Request],
        sampled_ids: Sequence[list[int]],
        layers: list[SlabLayer],
        rows: list[int],
        width: int,
    ) -> None:
        """Keeps rows of a slab, until the limit is reached.

        Args:
            requests: The request of each row.
            sampled_ids: The sampled tokens of each row that the model has read.
            layers: The slabs.
            rows: Indices in the slabs.
            width: Columns of the slabs before the first sampled token.
        """
        room = self.limit - self.num_tokens
        for request, ids, row in zip(requests, sampled_ids, rows, strict=True):
            room -= len(request.token_ids) + len(ids)
            if room < 0:
                return
            # The padding between prompt and completion is left out.
            spans = [slice(len(request.token_ids)), slice(width, width + len(ids))]
            states = [
                [torch.cat([slab[row, :, span] for span in spans], 1) for slab in layer.slabs] for layer in layers
            ]
            self._new[request.prompt_id, request.sample] = KeptRow([*request.token_ids, *ids], states)

    def end(self) -> None:
        """Ends a call: the next call finds the rows that this call has kept."""
        self._rows = self._new
        self._new = {}
