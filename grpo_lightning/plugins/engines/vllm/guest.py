"""Runs a library with process-wide side effects, such as vLLM, and restores the process after each call."""

import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


# Sets the default process group. None is as before `init_process_group`, but the group lives on. torch 2.13 has no
# public function for it.
_set_default_group = distributed_c10d._update_default_pg


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _signals() -> dict[int, Any]:
    # Python lets only the main thread set them.
    is_main = threading.current_thread() is threading.main_thread()
    return {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}


def _set_signals(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _algorithms() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: dict(os.environ), _set_environment),
    (random.getstate, random.setstate),
    (_signals, _set_signals),
    (lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
    (lambda: sys.stdout, lambda file: setattr(sys, "stdout", file)),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_algorithms, lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
]
"""The functions that read and write each setting of the process."""


class Guest:
    """Isolates a library inside this process, and restores the process after each call.

    Inside `at_home` the library has its environment variables and its default process group. Outside, both are gone,
    and all else is as before: generators of Python, NumPy and torch, thread counts, signal handlers, the hook for
    exceptions, warnings, and the precision of matrix products. Inside, autocast, inference mode and deterministic
    algorithms are off, and the default type is float32, since the library chooses its types itself.

    Args:
        environment: Environment variables, which override the user's.
        defaults: Environment variables that the user's override.
    """

    def __init__(self, environment: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        self.environment = environment
        self.defaults = defaults
        self._group: Any = None
        self._functions: dict[tuple[Any, str], Any] = {}

    @contextmanager
    def at_home(self, device: torch.device, **environment: str) -> Iterator[None]:
        """A context for calls of the library, with further environment variables."""
        cuda = device.type == "cuda"
        with (
            _settings(),
            self._own_group(),
            self._own_functions(),
            torch.random.fork_rng([device] if cuda else []),
            torch.autocast(device.type, enabled=False),
            torch.inference_mode(False),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            torch.set_default_dtype(torch.float32)
            # Some algorithms of vLLM have no deterministic form, and raise under `trainer.deterministic`.
            torch.use_deterministic_algorithms(False)
            # vLLM needs a file behind sys.stdout, which a notebook's need not have.
            try:
                sys.stdout.fileno()
            except (AttributeError, OSError, ValueError):
                sys.stdout = sys.__stdout__
            os.environ.update({**self.defaults, **os.environ, **self.environment, **environment})
            yield

    @contextmanager
    def _own_group(self) -> Iterator[None]:
        """A context with the library's default process group, if it made one; Lightning must not use it."""
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
        """A context for the library's end, inside `at_home`: it hides a default process group that others made.

        vLLM would destroy it.
        """
        hidden = distributed.group.WORLD if self._group is None else None
        if hidden is not None:
            _set_default_group(None)
        try:
            yield
        finally:
            if hidden is not None:
                _set_default_group(hidden)

    @contextmanager
    def _own_functions(self) -> Iterator[None]:
        """A context with the functions that the library has put in place of torch's."""
        originals = {name: getattr(*name) for name in REPLACED}
        for name, function in self._functions.items():
            setattr(*name, function)
        try:
            yield
        finally:
            self._functions = {name: getattr(*name) for name in REPLACED}
            for name, function in originals.items():
                setattr(*name, function)


@contextmanager
def _settings() -> Iterator[None]:
    """A context that restores the settings of the process, and NumPy's generator."""
    values = [read() for read, _ in SETTINGS]
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        for value, (read, write) in zip(values, SETTINGS, strict=True):
            if read() != value:
                write(value)
