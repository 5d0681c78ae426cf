"""Which operations make the host wait for a CUDA device, and a list of those that happened, each with its line.

A wait is cheap on an idle device and expensive on a busy one: the host must see all queued kernels end before it queues
the next. What `torch.cuda.set_sync_debug_mode` would report is listed here by operation, since no device is needed.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch
import transformers
from torch import Tensor

from helpers.paths import ROOT

OWN = ("host_syncs.py", "other_device.py")

aten = torch.ops.aten

SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.nonzero_numpy.default,
    aten.argwhere.default,
    aten.masked_select.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.masked_scatter.default,
}
"""Operations whose result's shape, or a check of whose arguments, the host has to read from the device."""

READS = {aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default, aten.is_nonzero.default}
"""Operations that give a Python number."""

INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}


@dataclass(frozen=True, slots=True)
class Sync:
    """One wait of the host for the device."""

    operation: str
    """What waited, such as `_local_scalar_dense` (item, bool, int, float), `nonzero` or `to host`."""
    upload: bool
    """Whether it copied pageable memory to the device, which waits as well."""
    line: str
    """The innermost line of grpo_lightning on the stack, `engines/native.py:147`; else of whoever called."""


@dataclass
class HostSyncs:
    """The waits since it was made or cleared, in order."""

    events: list[Sync] = field(default_factory=list)

    def add(self, operation: str, upload: bool = False) -> None:
        """Notes a wait by whoever is running."""
        self.events.append(Sync(operation, upload, line_of_caller()))

    def clear(self) -> None:
        """Forgets all."""
        self.events.clear()

    def __len__(self) -> int:
        return len(self.events)

    @property
    def waits(self) -> list[Sync]:
        """Those that read from the device."""
        return [event for event in self.events if not event.upload]

    @property
    def uploads(self) -> list[Sync]:
        """Those that copied to it."""
        return [event for event in self.events if event.upload]

    def by_line(self) -> Counter[tuple[str, str]]:
        """How often each (line, operation) waited."""
        return Counter((event.line, event.operation) for event in self.events)

    def __str__(self) -> str:
        """A table for messages: the most frequent first."""
        return "\n".join(f"{count:5} {line:45} {name}" for (line, name), count in self.by_line().most_common())


def operation_that_waits(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: Callable[[Any], bool]
) -> str | None:
    """The name of `operation` if it makes the host wait for values on the device; copies between devices are not here.

    Args:
        operation: An `OpOverload` of aten.
        args: Its arguments.
        kwargs: Its arguments by name.
        on_device: Whether a tensor is on the device.
    """
    if not any(map(on_device, tensors_in((args, kwargs)))):
        return None
    name = operation._schema.name.removeprefix("aten::")
    if operation in SHAPED_BY_VALUES | READS:
        return name
    if operation is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return name
    if operation in INDEXING:
        indices = args[1]
        by_mask = any(on_device(i) and i.dtype in (torch.bool, torch.uint8) for i in indices if i is not None)
        # One value for all chosen elements is a masked_fill.
        filled = len(args) > 2 and args[2].ndim == 0
        return f"{name} by a mask" if by_mask and not filled else None
    if operation is aten.isin.Tensor_Tensor:
        # isin_Tensor_Tensor_out of TensorCompare.cpp sorts where there are many values to look for.
        elements, values = args[:2]
        return name if values.numel() >= 10 * elements.numel() ** 0.145 else None
    return None


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


LIBRARIES = tuple(Path(module.__file__).parent for module in (lightning, transformers))


def line_of_caller() -> str:
    """The innermost line on the stack that is the package's; else Lightning's or transformers'; else the tests'."""
    frame: FrameType | None = sys._getframe(1)
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    for folders in ([ROOT / "grpo_lightning"], LIBRARIES, [ROOT / "tests"]):
        for file, line in lines:
            for folder in folders:
                if file.startswith(f"{folder}/") and Path(file).name not in OWN:
                    beside = folder if folder.parent == ROOT else folder.parent
                    return f"{Path(file).relative_to(beside)}:{line}"
    return f"{Path(lines[-1][0]).name}:{lines[-1][1]}"
