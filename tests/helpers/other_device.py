"""A device that is not the CPU, for machines that have none: tensors over CPU memory that claim to be elsewhere.

Inside `other_device()` a tensor made on, or moved to, `device()` is a `DeviceTensor`. It computes on the CPU and is as
strict as CUDA: an operation on tensors of both devices raises, with CUDA's exceptions, a CPU tensor without dimensions
beside others and CPU indices. tests/gpu/test_waits.py counts how often the host waits for a device.

PyTorch sees a backend registered under its PrivateUse1 key, as an accelerator of another vendor would be. Differences
to CUDA: attention uses the math kernel, random numbers are the CPU's, and `device.type` is "other" (`is_cuda` is true).
"""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten

NAME = "other"
MODULE = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16],
)
"""What PyTorch asks of `torch.other`."""
LIBRARIES: list[torch.library.Library] = []

INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
INDEXING.add(aten._unsafe_index.Tensor)
COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default, aten._copy_from.default}
NUMBERS = {aten.where.self, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill.Tensor, aten.fill_.Tensor}
NUMBERS |= INDEXING
"""Operations that take a CPU tensor without dimensions, beside those that work element by element."""


@functools.cache
def device() -> torch.device:
    """The device; PyTorch knows it from the first call on, for the rest of the process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
    # For threads that have not entered `OtherDevice`: transformers reads weights in several.
    LIBRARIES.append(torch.library.Library("aten", "IMPL", "PrivateUse1"))
    for name, operation in (("empty.memory_format", aten.empty.memory_format), ("empty_strided", aten.empty_strided)):
        LIBRARIES[-1].impl(name, functools.partial(_outside, operation))
    return torch.device(NAME, 0)


def _outside(operation: Any, *args: Any, **kwargs: Any) -> "DeviceTensor":
    return DeviceTensor(operation(*args, **kwargs | {"device": torch.device("cpu")}))


class DeviceTensor(Tensor):
    """A tensor on the other device. `on_cpu` holds its values."""

    on_cpu: Tensor
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> "DeviceTensor":
        facts = {"strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset(), "dtype": on_cpu.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, on_cpu.size(), **facts, device=device())
        tensor.on_cpu = on_cpu
        return tensor

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"DeviceTensor({self.on_cpu!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch would copy the storage of a tensor with an address, and this one has none.
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__ = copy.deepcopy(self.__dict__, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A file holds the values; they are loaded to the CPU.
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


def on_device(value: Any) -> bool:
    """Whether `value` is a tensor on the other device."""
    return isinstance(value, DeviceTensor)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class OtherDevice(TorchDispatchMode):
    """While it is entered, `device()` can be used like a GPU."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd"):
            with self:  # In inference mode they come here before they have been taken apart.
                return operation.decompose(*args, **kwargs)
        return _run(operation, args, kwargs)


@contextmanager
def other_device() -> Iterator[torch.device]:
    """The device, with all that must be set for it."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # A module keeps its parameters, and what is tied stays tied, when it moves to a tensor class of its own.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # The backward pass runs in this thread, so that it sees the mode.
        with torch.autograd.set_multithreading_enabled(False), OtherDevice(), _Constructors():
            yield device()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


class _Constructors(TorchFunctionMode):
    """Makes tensors of Python numbers on the CPU and copies them, as CUDA does; PyTorch hides that from a mode."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.new_tensor and on_device(args[0]):
            kwargs = {"dtype": args[0].dtype, "device": device()} | kwargs
            function, args = torch.tensor, args[1:]
        if function in (Tensor.__getitem__, Tensor.__setitem__) and on_device(args[0]):
            args = (args[0], _without_lists(args[1]), *args[2:])
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and is_device(kwargs.get("device")):
            target = kwargs.pop("device")
            requires_grad = kwargs.pop("requires_grad", False)
            return function(*args, **kwargs).to(target).requires_grad_(requires_grad)
        return function(*args, **kwargs)


def _without_lists(index: Any) -> Any:
    """An index whose lists have become tensors on the device."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index).to(device()) if isinstance(index, list) else index


def is_device(name: Any) -> bool:
    """Whether a device, or its name, is the other one."""
    return name is not None and not isinstance(name, int) and torch.device(name).type == NAME


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation of aten on the CPU; its results are on the device it would have put them on."""
    if torch.is_inference_mode_enabled():
        # A wrapper that is an inference tensor could not be a view of one that is none.
        with torch.inference_mode(False), torch.no_grad():
            return _run(operation, args, kwargs)
    target = kwargs.get("device")
    there = any(map(on_device, tensors_in((args, kwargs)))) if target is None else is_device(target)
    _refuse_mixture(operation, args, kwargs, there)
    owners: dict[int, Tensor] = {}

    def unwrapped(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            owners[id(value.on_cpu)] = value
            return value.on_cpu
        return value

    def wrapped(value: Any) -> Any:
        if id(value) in owners:  # What an in-place operation or `out=` gives back.
            return owners[id(value)]
        return DeviceTensor(value) if there and isinstance(value, Tensor) and not on_device(value) else value

    inner_args, inner_kwargs = tree_map(unwrapped, (args, kwargs))
    if target is not None:
        inner_kwargs["device"] = torch.device("cpu") if is_device(target) else target
    results = operation(*inner_args, **inner_kwargs)
    if torch.Tag.inplace_view in operation.tags and on_device(args[0]):
        with no_dispatch():  # The outer tensor's own shape.
            operation(*args, **kwargs)
    return tree_map(wrapped, results)


def _refuse_mixture(operation: Any, args: Any, kwargs: Any, there: bool) -> None:
    """Raises as CUDA does where tensors of both devices meet and may not."""
    generator = kwargs.get("generator")
    if there and generator is not None:
        raise RuntimeError(f"Expected a {NAME!r} device type for generator but found {generator.device.type!r}")
    if operation in COPIES:
        return
    rest: Any = (args, kwargs)
    if operation in INDEXING:
        # Indices may lie on the CPU for a tensor that is elsewhere, not the other way round.
        own, indices, *values = args
        if not on_device(own) and any(map(on_device, tensors_in(indices))):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
        rest = (own, values)
    given = tensors_in(rest)
    # An operation that works element by element takes a tensor without dimensions from the CPU as a number.
    numbers = torch.Tag.pointwise in operation.tags or operation in NUMBERS
    written = [one for one, of in zip(args, operation._schema.arguments, strict=False) if of.alias_info is not None]
    for argument in given if any(map(on_device, given)) else ():
        number = numbers and argument.ndim == 0 and not any(argument is one for one in written)
        if not on_device(argument) and not number:
            raise RuntimeError(f"Expected all tensors to be on the same device ({operation}: {argument.device})")


class OtherAccelerator(CPUAccelerator):
    """The device as Lightning's Trainer sees it."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == NAME

    @staticmethod
    def name() -> str:
        return NAME


class OtherStrategy(SingleDeviceStrategy):
    """One process on the device."""

    def __init__(self) -> None:
        super().__init__(device=device(), accelerator=OtherAccelerator())


AcceleratorRegistry.register(NAME, OtherAccelerator)
StrategyRegistry.register("other_device", OtherStrategy)

TRAINER = {"accelerator": NAME, "strategy": "other_device", "devices": 1}
"""The Trainer's options for it."""
