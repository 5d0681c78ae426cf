"""A CPU that calls itself cuda:0, on which whole runs go as on a GPU, so far as that needs no GPU.

    python -m fake_gpu FOLDER < RUNS

Tensors of the device are CPU tensors in a wrapper that carries the device's name, so torch itself chooses what it would
choose on a GPU: autocast's casts, the device of a new tensor, the branches of the package. An operation that mixes
devices raises, and every wait of the host and every kernel is counted for the phase of the run that it happens in.
Kernels themselves, their speed, and backward passes are a real GPU's: gradients are made up here.

RUNS is a JSON object of the options of `grpo fit` by name. For each of them a line of JSON tells what was counted. The
process is a GPU's until it ends.
"""

import contextlib
import ctypes
import io
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
VIEWS = """_reshape_alias _unsafe_view alias as_strided detach diagonal empty empty_like empty_strided expand flatten
is_pinned is_same_size lift_fresh new_empty new_empty_strided permute record_stream resize_ select set_ slice split
split_with_sizes squeeze t transpose unbind unflatten unfold unsqueeze view view_as"""
LAUNCHES_NOTHING = {*VIEWS.split(), "_local_scalar_dense"}
SHAPED_BY_NUMBERS = "_unique2 bincount masked_select nonzero unique_consecutive"
WAITS = {*SHAPED_BY_NUMBERS.split(), "_local_scalar_dense", "equal", "is_nonzero"}
"""Operations whose result the host must see: a number, or a shape that depends on numbers."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Counts:
    """What happens in each phase of a run; the innermost phase counts."""

    def __init__(self) -> None:
        self.phase = "other"
        self.calls, self.kernels, self.bool_masks = Counter[str](), Counter[str](), 0
        self.waits: dict[str, Counter[str]] = {}
        self.cudnn_calls = 0
        self.is_on = True

    def wait(self, reason: str) -> None:
        """Counts a wait, by the line that waits."""
        self.waits.setdefault(self.phase, Counter())[f"{reason} at {line()}"] += 1

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Counts nothing inside."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            self.calls[phase] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        return call


counts = Counts()


def line() -> str:
    """The innermost line of the package on the stack, or of a library where there is none."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_stack()[:-2] if frame.filename != __file__]
    package = [
        f"{name.partition('/grpo_lightning/')[2]}:{number}" for name, number in lines if "/grpo_lightning/" in name
    ]
    return package[-1] if package else f"{lines[-1][0]}:{lines[-1][1]}"


class DeviceTensor(Tensor):
    """A tensor of the device: its numbers are in a tensor of the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor, requires_grad: bool = False) -> Any:
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset(), "layout": numbers.layout}
        wrapper: Any = torch.Tensor._make_wrapper_subclass(
            cls, numbers.size(), dtype=numbers.dtype, device=DEVICE, requires_grad=requires_grad, **layout
        )
        wrapper.numbers = numbers
        return wrapper

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = DeviceTensor(self.numbers.clone())
        is_parameter = isinstance(self, torch.nn.Parameter)
        copied = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Tensor.clone, (self.numbers.detach().clone(),)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation with tensors of the device, or for it."""
    name = func._schema.name.split("::")[1]
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    reads_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
    device = kwargs.get("device")
    is_made_there = reads_device if device is None else on_device(device)
    is_copy = name == "copy_" or (name == "_to_copy" and reads_device != is_made_there)
    if name == "copy_":
        is_made_there = isinstance(args[0], DeviceTensor)
        is_copy = is_made_there != isinstance(args[1], DeviceTensor)
    if counts.is_on and is_copy and not kwargs.get("non_blocking"):
        counts.wait("copy to the GPU" if is_made_there else "copy from the GPU")
    elif counts.is_on and not is_copy and reads_device:
        on_host = [tensor for tensor in tensors if tensor.dim() and not isinstance(tensor, DeviceTensor)]
        if name in INDEXING and isinstance(args[0], DeviceTensor):
            masks = [leaf for leaf in args[1] if isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8)]
            if masks or on_host:
                counts.wait(f"{name} by a mask or by indices of the host")
        elif on_host and name not in ("copy_", "lift_fresh", "is_same_size"):
            raise RuntimeError(f"{name} mixes devices: {[(tuple(one.shape), str(one.device)) for one in tensors]}")
        if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            counts.wait(name)
    if counts.is_on and (reads_device or is_made_there) and not is_copy:
        counts.kernels[counts.phase] += name not in LAUNCHES_NOTHING
    if name in ("_softmax", "_log_softmax") and args[2]:  # from 16 bits to float32, which a CPU does not do in one
        args = (args[0].float(), args[1], False)
    options = dict(kwargs)
    options |= {"device": torch.device("cpu")} if on_device(device) else {}
    options |= {"pin_memory": False} if options.get("pin_memory") else {}
    result = func(*tree_map(numbers_of, args), **tree_map(numbers_of, options))
    if not is_made_there:
        return result
    result = tree_map(lambda leaf: DeviceTensor(leaf) if type(leaf) is Tensor else leaf, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if reads_device else result


def numbers_of(leaf: Any) -> Any:
    return leaf.numbers if isinstance(leaf, DeviceTensor) else leaf


class Operations(TorchDispatchMode):
    """Sends to the device what belongs there, also where only the `device` argument tells."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        belongs = on_device(kwargs.get("device")) or any(isinstance(leaf, DeviceTensor) for leaf in leaves)
        return computed(func, args, kwargs) if belongs else func(*args, **kwargs)


class Functions(TorchFunctionMode):
    """What torch decides by the card before any operation: the kernel of attention, `tolist`, `cuda` for `cuda:0`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: with_index(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(with_index, args))
        if args and isinstance(args[0], DeviceTensor):
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                args[0].numbers = args[1].numbers
            if func is Tensor.numpy:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            if func is Tensor.tolist:
                counts.wait("tolist")
                return args[0].numbers.tolist()
            if func is torch.nn.functional.scaled_dot_product_attention:
                return attention(*args, **kwargs)
            if func in (torch.rms_norm, torch.nn.functional.rms_norm):  # one kernel in a build with CUDA alone
                counts.kernels[counts.phase] += 1
                with counts.off():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def with_index(value: Any) -> Any:
    is_plain = value == "cuda" if isinstance(value, str) else isinstance(value, torch.device) and value.index is None
    return DEVICE if is_plain and on_device(value) else value


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One kernel, and two that make numbers of a mask of bools."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (states.to(dtype) for states in (query, key, value))
        is_number = attn_mask is not None and attn_mask.dtype != torch.bool
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and is_number else attn_mask
    has_bools = attn_mask is not None and attn_mask.dtype == torch.bool
    assert attn_mask is None or isinstance(attn_mask, DeviceTensor), "a mask of the host"
    assert has_bools or attn_mask is None or attn_mask.dtype == query.dtype, "a mask of another type"
    counts.cudnn_calls += torch.backends.cuda.cudnn_sdp_enabled()
    counts.kernels[counts.phase] += 1 + 2 * has_bools
    counts.bool_masks += has_bools and counts.phase == "position"
    with counts.off():
        groups = query.shape[1] // key.shape[1] if enable_gqa else 1
        key, value = (states.repeat_interleave(groups, 1, output_size=query.shape[1]) for states in (key, value))
        scores = (query.float() * (scale or query.shape[-1] ** -0.5)) @ key.float().mT
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if has_bools else scores + attn_mask
        # A query that sees nothing, as in the padding of PlainEngine, gets zeros.
        return (scores.softmax(-1).nan_to_num(0.0) @ value.float()).to(query.dtype)


def become_a_gpu() -> None:
    """Makes torch believe that this process has an H100. It is one until it ends."""
    # A build without CUDA has no guard for its device, and that of `meta`, which does nothing, does.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[1] or guards[14]  # the numbers of CUDA and Meta in c10/core/DeviceType.h
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    card = SimpleNamespace(name="fake H100", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "device_count": 1,
        "current_device": 0,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "mem_get_info": (70 * 2**30, 80 * 2**30),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_stats": {},
        "get_device_name": card.name,
        "get_device_properties": card,
        "get_device_capability": (9, 0),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [],
    }
    ignored = "_lazy_init set_device synchronize empty_cache reset_peak_memory_stats set_rng_state set_rng_state_all"
    answers |= dict.fromkeys((*ignored.split(), "manual_seed", "manual_seed_all"))
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.device = lambda index=None: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.accelerator.is_available = lambda: True


def watch_phases() -> None:
    """Divides a run into phases, and makes gradients up: torch has no backward pass for a device that is not there."""
    from grpo_lightning.grpo.loop import GRPOLoop
    from grpo_lightning.plugins.engines.native import native_batch as batch
    from grpo_lightning.plugins.looking.inspector import candidates
    from grpo_lightning.policy.policy import Policy
    from grpo_lightning.training import module, question_values
    from grpo_lightning.training.lightning_machine import LightningMachine

    phases: list[tuple[Any, str, str]] = [
        (batch.Batch, "_forward", "position"),
        (batch, "sample_tokens", "draw"),
        (Policy, "forward", "micro_batch"),
        (module, "update", "update"),
        (question_values.QuestionValues, "update", "validation metrics"),
        (candidates, "learned_from", "inspector"),
    ]
    for owner, name, phase in phases:
        setattr(owner, name, counts.within(phase, getattr(owner, name)))

    begin, read = GRPOLoop.on_train_epoch_start, Policy._read_weights

    def train(loop: Any, *args: Any) -> Any:
        # What trials before the run counted.
        counts.kernels.clear()
        counts.calls.clear()
        return begin(loop, *args)

    def read_weights(policy: Any) -> Any:
        with torch.device("cpu"):
            model = read(policy)
        model.to("cuda:0")
        model.tie_weights()
        return model

    def backward(machine: Any, objective: Tensor) -> None:
        if machine.scaler:
            machine.scaler.scale(objective.detach())
        with counts.off():
            for parameter in machine.module.policy.parameters():
                parameter.grad = torch.full_like(parameter, 1e-4) if parameter.requires_grad else None

    GRPOLoop.on_train_epoch_start = train  # type: ignore[method-assign]
    Policy._read_weights = read_weights  # type: ignore[method-assign]
    LightningMachine.backward = backward  # type: ignore[method-assign]


def main() -> None:
    """Runs each configuration, in a folder that `furnish` has filled."""
    from grpo_lightning import cli

    become_a_gpu()
    watch_phases()
    for name, options in json.load(sys.stdin).items():
        vars(counts).update(vars(Counts()))
        text, error = io.StringIO(), ""
        torch.use_deterministic_algorithms(False)
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), Operations(), Functions():
            try:
                cli.run(options)
            except SystemExit as end:
                error = f"exit {end.code}" if end.code else ""
            except BaseException as failure:
                error = "".join(traceback.format_exception(failure)[-6:])
        noted = {**vars(counts), "name": name, "error": error, "text": text.getvalue()}
        print(json.dumps(noted), flush=True)


if __name__ == "__main__":
    main()
