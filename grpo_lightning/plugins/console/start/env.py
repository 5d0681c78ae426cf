"""`grpo env`: the versions and the hardware, for a bug report; with `--run` those that made a run."""

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_lightning.plugins.looking.run_files.provenance import FILE, environment, read_starts
from grpo_lightning.plugins.looking.run_files.run_configs import flat
from grpo_lightning.types import UsageError


def main(args: Sequence[str] | None = None) -> int:
    """Prints a line per fact; returns the exit code."""
    description = "Prints the versions of Python and of the packages, and the hardware, for a bug report."
    parser = argparse.ArgumentParser("grpo env", description=description)
    parser.add_argument("--run", type=Path, metavar="DIR", help="print what made this run instead, and what differs")
    run = parser.parse_args(args).run
    facts = chain(packages(), hardware()) if run is None else of_run(run)
    try:
        for name, value in facts:
            print(f"{name}: {value}", flush=True)
    except BrokenPipeError:
        # `grpo env | head` ends early: further output goes nowhere, as Python's manual advises.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def of_run(run: Path) -> Iterator[tuple[str, str]]:
    """Yields what made each start of a run, with the present value where it differs, and what differs since then."""
    starts = read_starts(run)
    if not starts:
        raise UsageError(
            f"--run {run}: it has no {FILE}, which `grpo fit` writes from this version on, and a run in Python with "
            "Trainer(callbacks=[..., Provenance()])"
        )
    present = environment()
    for number, start in enumerate(starts, 1):
        yield f"start {number}", f"after step {start.pop('step', 0)}"
        for name, value in flat(start).items():
            differs = name in present and present[name] != value
            yield f"  {name}", f"{shown(value)}{f' (here: {shown(present[name])})' if differs else ''}"
    changed_names = [name for name, value in present.items() if starts[-1].get(name) != value]
    yield "differs here from the newest start", ", ".join(changed_names) or "nothing"


def shown(value: Any) -> str:
    """Returns a value as text; `none` for no commit and no GPU."""
    return "none" if value is None else str(value)


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
