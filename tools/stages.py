"""What `make demo` and `make real` have in common: commands one after the other, and what they changed."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from plot_run import plot

from grpo_lightning.plugins.inspect.arms import flat, read_config
from grpo_lightning.plugins.inspect.judges import measure
from grpo_lightning.plugins.inspect.scalars import read_scalars, validation_names

ROOT = Path(__file__).resolve().parents[1]


def run_stages(stages: Sequence[tuple[str, list[str]]]) -> None:
    """Runs Python with the arguments of each stage in the repository's root; a failure ends the program."""
    for number, (what, arguments) in enumerate(stages, 1):
        print(f"\n{number}/{len(stages)} {what}: python {' '.join(arguments)}", flush=True)
        run(arguments)


def run(arguments: list[str]) -> None:
    """Runs Python with `arguments` in the repository's root; a failure ends the program."""
    # Idle OpenMP threads sleep: spinning, they would take the cores from each other.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    code = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(f"failed with exit code {code}: python {' '.join(arguments)}")


def summary(folder: str, seconds: float) -> str:
    """First and last validation of a run, its time and where to look. The first must be from before training."""
    scalars = read_scalars(ROOT / folder)
    found = []
    for name in validation_names(scalars)[:2]:
        (first_update, first), *_, (_, last) = scalars[name]
        assert first_update == -1, f"{name} starts at {first_update}, not before training"
        found.append(f"{name.removeprefix('val/')} {first:.2f} -> {last:.2f}")
    page = page_of(folder)
    pages = f"every token in {page}, " if (ROOT / page).exists() else ""
    judged = measure([flat(read_config(ROOT / folder / "config.yaml") or {})])
    return f"{', '.join(found)} ({judged}) in {seconds:.0f} s; see {pages}the curves with tensorboard --logdir runs"


def show(folder: str) -> None:
    """Writes the page of every token, if the run recorded them, and the picture, if matplotlib is installed."""
    if (ROOT / folder / "inspect").is_dir():
        run(["-m", "grpo_lightning", "inspect", folder, "-o", page_of(folder)])
    if importlib.util.find_spec("matplotlib"):
        plot(ROOT / folder, ROOT / folder / "curve.png")
        print(f"\n{folder}/curve.png")


def page_of(folder: str) -> str:
    """The page of every token of a run."""
    return f"{folder}/inspect.html"
