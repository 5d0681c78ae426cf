"""A stand-in for CUDA graphs on a machine without a GPU: operations recorded with their tensors, and run again on them.

A recorded step has none of its Python: a replay runs the same operations of aten on the same tensors. So whatever
depends on a Python number, or on a tensor that is somewhere else by then, gives wrong numbers, as on CUDA. It is
stricter where it can be: a tensor that the step read must still be alive, what it made is NaN between replays, and an
operation that waits for the device raises while the step is recorded.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from grpo_lightning.engines import graphs
from helpers.host_syncs import operation_that_waits, tensors_in

Step = Callable[[], None]


class RecordedGraphs:
    """What captures steps, as `CUDACapture` does. `captured` counts steps and `replayed` their replays."""

    captured = 0
    replayed = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch, kind: str = "cpu") -> type["RecordedGraphs"]:
        """Lets the engine capture on devices of type `kind`; returns a class with counts of its own."""
        fresh = type("Recorded", (cls,), {"captured": 0, "replayed": 0})
        monkeypatch.setitem(graphs.CAPTURES, kind, fresh)
        return fresh

    def __call__(self, step: Step) -> Step:
        step()
        with _Recorder() as recorder:
            step()
        own = type(self)
        own.captured += 1
        recorder.forget()

        def replay() -> None:
            own.replayed += 1
            recorder.replay()

        return replay


class _Outside:
    """A tensor that a recorded step reads and has not made: the graph does not keep it alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.alive = weakref.ref(tensor)
        # A tensor without dimensions becomes an argument of the kernel.
        self.number = tensor if tensor.ndim == 0 else None

    def __call__(self) -> Tensor:
        tensor = self.alive() if self.number is None else self.number
        if tensor is None:
            raise RuntimeError("a captured step reads a tensor that has been freed")
        return tensor


class _Recorder(TorchDispatchMode):
    """Records the operations of aten that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor], list[bool]]] = []
        """Operation, arguments, arguments by name, results, and whether each result has memory of its own."""
        self.made: dict[int, Tensor] = {}
        """Results, by id; held, so that no other tensor gets their ids."""
        self.outside: dict[int, _Outside] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (name := operation_that_waits(operation, args, kwargs, lambda one: isinstance(one, Tensor))) is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        given = tensors_in((args, kwargs))
        memories = {memory(one) for one in given}
        results = operation(*args, **kwargs)
        made = tensors_in(results)
        own = [memory(one) not in memories for one in made]
        self.operations.append((operation, *tree_map(self._reference, (args, kwargs)), made, own))
        given_ids = {id(one) for one in given}
        self.made |= {id(one): one for one in made if id(one) not in given_ids}
        return results

    def _reference(self, value: Any) -> Any:
        """`value`, or what gives it at a replay."""
        if not isinstance(value, Tensor) or id(value) in self.made:
            return value
        return self.outside.setdefault(id(value), _Outside(value))

    def forget(self) -> None:
        """Leaves nothing of the numbers that were computed while the step was recorded."""
        for _, _, _, made, own in self.operations:
            for tensor, is_own in zip(made, own, strict=True):
                if is_own and tensor.is_floating_point():
                    tensor.fill_(math.nan)

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the operations again. Casts are among them, so autocast is off."""
        with torch._C._DisableAutocast():
            for operation, args, kwargs, made, own in self.operations:
                args, kwargs = tree_map(lambda one: one() if isinstance(one, _Outside) else one, (args, kwargs))
                if operation.is_view:
                    continue
                for tensor, result, is_own in zip(made, tensors_in(operation(*args, **kwargs)), own, strict=True):
                    if is_own:
                        tensor.copy_(result)
        self.forget()


def memory(tensor: Tensor) -> int:
    """The address of the tensor's storage."""
    storage = getattr(tensor, "on_cpu", tensor).untyped_storage()
    return storage.data_ptr() or id(tensor)
