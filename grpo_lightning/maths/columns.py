"""Numbers of the drawn tokens, by name."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from grpo_lightning.types import UsageError

Value = TypeVar("Value", Tensor, Tensor | None)


class Column(Generic[Value]):
    """A column as an attribute: None as long as nobody needs it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, table: Any, owner: type) -> Value:
        return table.columns.get(self.name)

    def __set__(self, table: Any, values: Value) -> None:
        table.add_columns({self.name: values})


class Columns:
    """[N] float32 numbers by name: those that the framework reads, and what one method prepares for itself."""

    token_ids: Tensor
    """[N] int64, the tokens that the numbers are of."""
    columns: dict[str, Tensor]

    # Not annotated: in a dataclass they would be fields.
    advantage = Column[Tensor]()  # [N] Â, in units of the advantage estimator
    weight = Column[Tensor]()  # [N] factor in the objective, before its correction
    old_logp = Column[Tensor | None]()  # [N] log π_old; None: π_old is π_θ, and the ratio is 1
    ref_logp = Column[Tensor | None]()  # [N] log π_ref; None: there is no reference
    sampler_logp = Column[Tensor | None]()  # [N] log-prob of the token as it was drawn, filters included; None: unknown

    NAMES = ("advantage", "weight", "old_logp", "ref_logp", "sampler_logp")  # those that the framework itself reads

    def add_columns(self, columns: Mapping[str, Tensor | None]) -> None:
        """Keeps [N] float32 numbers by name; None takes a column away."""
        for name, values in columns.items():
            if values is None:
                self.columns.pop(name, None)
                continue
            if values.shape != self.token_ids.shape or values.dtype != torch.float32:
                actual = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
                raise UsageError(f"column {name!r} of the rollouts is {actual}: give float32 [{len(self.token_ids)}]")
            self.columns[name] = values
