"""A library that settles in the whole process, such as vLLM, as a guest: outside its calls nothing of it is seen."""

import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed import distributed_c10d

REPLACED: list[tuple[Any, str]] = [
    (torch, "set_num_threads"),
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
]
"""Functions of torch that vLLM replaces on a CPU, and calls itself."""


class Guest:
    """Lets a library run inside this process, and leaves the process as it was.

    Inside `at_home` the library has its environment variables and its default process group. Outside, these are gone;
    generators of Python, NumPy and torch, thread counts, signal handlers, the hook for exceptions, warnings, and the
    precision of matrix products are what they were. Autocast, inference mode and deterministic algorithms are off
    inside, and the default type is float32: the library has types of its own.

    Args:
        environment: Environment variables that the library must have.
        defaults: Environment variables for the library, unless the user has set them.
    """

    def __init__(self, environment: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        self.environment = environment
        self.defaults = defaults
        self._group: Any = None
        self._functions: dict[tuple[Any, str], Any] = {}

    @contextmanager
    def at_home(self, device: torch.device, **environment: str) -> Iterator[None]:
        """The library may do as it likes inside.

        Args:
            device: The policy's, whose generator is kept, too.
            **environment: Further environment variables.
        """
        cuda = device.type == "cuda"
        with ExitStack() as stack:
            for kept in (
                _environment,
                _generators,
                _signals,
                _hook,
                _output,
                _matmul_precision,
                _own_algorithms,
                self._own_group,
                self._torch,
            ):
                stack.enter_context(kept())
            stack.enter_context(torch.random.fork_rng([device] if cuda else []))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_default_dtype(torch.float32))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            os.environ.update({**self.defaults, **os.environ, **self.environment, **environment})
            yield

    @contextmanager
    def _own_group(self) -> Iterator[None]:
        """The library's default process group, where it made one; Lightning and metrics would use it."""
        if distributed.is_initialized():
            yield
            return
        if self._group is not None:
            _set_default_group(self._group)
        try:
            yield
        finally:
            self._group = distributed.group.WORLD
            if self._group is not None:
                _set_default_group(None)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Inside `at_home`, for the library's end: a default process group that is not its own is out of its sight.

        vLLM destroys whatever default group there is.
        """
        others = distributed.group.WORLD if self._group is None else None
        if others is not None:
            _set_default_group(None)
        try:
            yield
        finally:
            if others is not None:
                _set_default_group(others)

    @contextmanager
    def _torch(self) -> Iterator[None]:
        """Functions of torch that the library replaces with its own, and the number of threads."""
        before = {name: getattr(*name) for name in REPLACED}
        threads = torch.get_num_threads()
        for name, function in self._functions.items():
            setattr(*name, function)
        try:
            yield
        finally:
            self._functions = {name: getattr(*name) for name in REPLACED}
            for name, function in before.items():
                setattr(*name, function)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _set_default_group(group: Any) -> None:
    """Makes `group` the default process group; None is as before `init_process_group`, but the group lives on.

    torch has no public function for it (torch 2.13).
    """
    distributed_c10d._update_default_pg(group)


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _signals() -> Iterator[None]:
    # Python lets only the main thread set them.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _hook() -> Iterator[None]:
    """Keeps what prints an exception that ends the process: torch.distributed puts the rank before it."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextmanager
def _output() -> Iterator[None]:
    """vLLM wants a file behind sys.stdout, which a notebook's need not have."""
    before = sys.stdout
    try:
        before.fileno()
    except (AttributeError, OSError, ValueError):
        sys.stdout = sys.__stdout__
    try:
        yield
    finally:
        sys.stdout = before


@contextmanager
def _matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if torch.get_float32_matmul_precision() != before:
            torch.set_float32_matmul_precision(before)


@contextmanager
def _own_algorithms() -> Iterator[None]:
    """Any algorithms inside: some of vLLM's have no deterministic form, and raise under `trainer.deterministic`."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
