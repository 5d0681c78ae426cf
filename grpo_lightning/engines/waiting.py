"""Completions that wait until rows are free."""

from collections import deque
from collections.abc import Callable, Sequence

from grpo_lightning.types import Request

FREE_FRACTION = 0.25
"""Fraction of the rows that must be free before others begin. Reading prompts seldom is faster."""


class Waiting:
    """Completions that have not begun, group by group.

    Args:
        groups: Requests with equal `token_ids`, the longest prompts first.
        fits: The rows that fit at once, by the tokens of each; None fits all.
        max_new_tokens: Most tokens that may follow a prompt.
    """

    def __init__(
        self, groups: Sequence[Sequence[Request]], fits: Callable[[int], int] | None, max_new_tokens: int
    ) -> None:
        self._parts: deque[tuple[int, range]] = deque()
        """Tokens of each prompt, and the indices of its completions."""
        self._num_rows = 0
        for group in groups:
            self._parts.append((len(group[0].token_ids), range(self._num_rows, self._num_rows + len(group))))
            self._num_rows += len(group)
        self._fits = fits
        self._max_new_tokens = max_new_tokens

    def __len__(self) -> int:
        """Completions that wait."""
        return self._num_rows

    def take(self, going: int, width: int) -> list[range]:
        """The completions of each prompt that begin now; none while too few rows are free.

        Groups are cut only where they have more than half of the rows that fit.

        Args:
            going: Rows that go on.
            width: Tokens of their longest prompt.
        """
        fits = (
            self._num_rows if self._fits is None else self._fits(max(width, self._parts[0][0]) + self._max_new_tokens)
        )
        free = fits - going
        if going and free < min(max(1, FREE_FRACTION * fits), self._num_rows):
            return []
        taken: list[range] = []
        while self._parts and free > 0:
            tokens, part = self._parts.popleft()
            count = len(part) if len(part) <= free else free if 2 * len(part) > fits else 0
            if count < len(part):
                self._parts.appendleft((tokens, part[count:]))
            if not count:
                break
            taken.append(part[:count])
            free -= count
        self._num_rows -= sum(map(len, taken))
        return taken
