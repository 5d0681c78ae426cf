"""`grpo env`: the versions and the hardware, for a bug report."""

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version


def main(args: Sequence[str] | None = None) -> int:
    """Prints a line per fact; returns the exit code."""
    description = "Prints the versions of Python and of the packages, and the hardware, for a bug report."
    argparse.ArgumentParser("grpo env", description=description).parse_args(args)
    try:
        for name, value in (*packages(), *hardware()):
            print(f"{name}: {value}", flush=True)
    except BrokenPipeError:
        # `grpo env | head` ends early: further output goes nowhere, as Python's manual advises.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def packages() -> Iterator[tuple[str, str]]:
    """Yields the names and versions of Python, this package, and the installed packages that it can use."""
    import torch  # --help need not wait for it

    yield "python", f"{platform.python_version()}, {platform.platform()}"
    names = [re.split(r"[\[<>=;, ]", line)[0] for line in requires("grpo-lightning") or ()]
    for name in dict.fromkeys(("grpo-lightning", *names, "mlflow", "trackio", "wandb")):
        try:
            # The version of torch's metadata lacks the build.
            yield name, torch.__version__ if name == "torch" else version(name)
        except PackageNotFoundError:
            continue


def hardware() -> Iterator[tuple[str, str]]:
    """Yields the processor, the instruction set that torch uses, the GPUs, and the settings of threads."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    yield "cpu", f"{os.cpu_count()} cores, {platform.machine()}, {capability}; torch uses {torch.get_num_threads()}"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield f"gpu {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield "gpu", f"none that torch sees; CUDA of this build of torch: {torch.version.cuda}"
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            yield name, os.environ[name]
