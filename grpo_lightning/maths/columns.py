"""Numbers of the sampled tokens, by name."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from grpo_lightning.types import UsageError

Value = TypeVar("Value", Tensor, Tensor | None)


class Column(Generic[Value]):
    """Exposes `columns[name]` as an attribute; None if it is absent."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, table: Any, owner: type) -> Value:
        return table.columns.get(self.name)

    def __set__(self, table: Any, values: Value) -> None:
        table.add_columns({self.name: values})


class Columns:
    """[N] float32 numbers by name: columns that the framework reads, and columns that a method adds for itself."""

    token_ids: Tensor
    """[N] int64, the tokens that the numbers belong to."""
    columns: dict[str, Tensor]
    """[N] float32 numbers of the tokens by name."""

    # Not annotated: in a dataclass they would be fields.
    advantage = Column[Tensor]()
    """[N] float32 Â, in units of the advantage estimator."""
    weight = Column[Tensor]()
    """[N] float32 factor in the objective, before the correction."""
    old_logp = Column[Tensor | None]()
    """[N] float32 log π_old; None: π_old is π_θ, and the ratio is 1."""
    ref_logp = Column[Tensor | None]()
    """[N] float32 log π_ref; None: there is no reference."""
    sampler_logp = Column[Tensor | None]()
    """[N] float32 log-prob with which the token was sampled, filters included; None: unknown."""

    NAMES = ("advantage", "weight", "old_logp", "ref_logp", "sampler_logp")
    """The columns that the framework reads."""

    def add_columns(self, columns: Mapping[str, Tensor | None]) -> None:
        """Adds or replaces [N] float32 numbers by name; None removes a column."""
        for name, values in columns.items():
            if values is None:
                self.columns.pop(name, None)
                continue
            if values.shape != self.token_ids.shape or values.dtype != torch.float32:
                actual = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
                raise UsageError(f"column {name!r} of the rollouts is {actual}: give float32 [{len(self.token_ids)}]")
            self.columns[name] = values
