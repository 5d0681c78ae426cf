"""An order that prefers questions which are solved sometimes, but not always."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.plugins.data.orders.adaptive import Adaptive
from grpo_lightning.tasks.orders import Shuffled
from grpo_lightning.types import Question, UsageError, require

POOLS = {"new": 3.0, "middling": 6.0, "hard": 1.0, "easy": 0.5}
"""The pools, and the proportions in which they are asked by default."""


class DifficultyPools(Adaptive):
    """Asks new, middling, hard and easy questions, by their pass rate, in fixed proportions.

    A group teaches if its rewards differ, so middling questions come most. A question enters their pool once its pass
    rate is above `hard` and below `easy`, and leaves it as the policy learns. Inside a pool the question asked longest
    ago comes next; new questions come in shuffled order. The other pools take over from an empty pool.

    Args:
        parts: Proportions in which the pools are asked, by default `{new: 3, middling: 6, hard: 1, easy: 0.5}`; a pool
            that is left out keeps its default.
        hard: Pass rate up to which a question is hard.
        easy: Pass rate from which a question is easy.
        memory: Weight of the earlier groups in a question's pass rate, from 0, the last group alone, to below 1.
    """

    def __init__(
        self, parts: dict[str, float] | None = None, hard: float = 0.0, easy: float = 1.0, memory: float = 0.5
    ) -> None:
        self.parts = POOLS | (parts or {})
        if self.parts.keys() != POOLS.keys() or not min(self.parts.values()) >= 0 < max(self.parts.values()):
            raise UsageError(
                f"data.order.parts={parts}: give any of {', '.join(POOLS)}, from 0, and not 0 for all four"
            )
        require(hard < easy, f"data.order.hard={hard}: give less than data.order.easy={easy}")
        require(0 <= memory < 1, f"data.order.memory={memory}: give 0 to less than 1")
        self.hard = hard
        self.easy = easy
        self.memory = memory

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        super().setup(questions, seed)
        shuffled = Shuffled()
        shuffled.setup(questions, seed)
        size = len(questions)
        self.last = torch.empty(size, dtype=torch.int64)
        """[questions] int64, the id under which each was asked last; before that below 0, in shuffled order."""
        self.last[torch.tensor(shuffled.next(range(size)))] = torch.arange(-size, 0)
        self.rate = torch.full((size,), torch.nan, dtype=torch.float64)
        """[questions] float64 pass rates; NaN for new questions."""

    def choose(self, id: int) -> int:
        # Rewards that a question waits for may move it to another pool.
        waits = torch.zeros(len(self.rate), dtype=torch.bool)
        waits[[*self.row_by_id.values()]] = True
        pools = {name: pool & ~waits for name, pool in self.pools().items()}

        # One of the pools that are not empty is chosen.
        names = [name for name in POOLS if self.parts[name] and pools[name].any()]
        weights = [self.parts[name] for name in names]
        candidates = pools[self.chance(id).choices(names, weights)[0]] if names else ~waits
        if not candidates.any():  # more questions are asked at once than there are
            candidates = ~candidates

        row = int(torch.where(candidates, self.last, torch.iinfo(torch.int64).max).argmin())
        self.last[row] = id
        return row

    def pools(self) -> dict[str, Tensor]:
        """[questions] bool for each pool: which questions are in it."""
        is_new = self.rate.isnan()
        is_hard = self.rate <= self.hard
        is_easy = self.rate >= self.easy
        return {"new": is_new, "middling": ~(is_new | is_hard | is_easy), "hard": is_hard, "easy": is_easy}

    def learn(self, row: int, rewards: list[float]) -> None:
        rate = float(self.rate[row])
        group_rate = sum(rewards) / len(rewards)
        self.rate[row] = group_rate if math.isnan(rate) else self.memory * rate + (1 - self.memory) * group_rate

    def learned(self) -> dict[str, float]:
        return {f"order/{name}": float(pool.double().mean()) for name, pool in self.pools().items()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"last": self.last.clone(), "rate": self.rate.clone()}

    def restore(self, state: dict[str, Any]) -> None:
        self.last = state["last"].clone()
        self.rate = state["rate"].clone()
