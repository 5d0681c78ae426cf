"""What `make demo` and `make real` have in common: commands one after the other, and what they changed."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from plot_run import plot

from grpo_lightning.inspect.scalars import read_scalars, validation_names

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


def changes(folder: Path) -> str:
    """First and last validation of a run in one line. The first must be from before training."""
    scalars = read_scalars(folder)
    found = []
    for name in validation_names(scalars)[:2]:
        (first_update, first), *_, (_, last) = scalars[name]
        assert first_update == -1, f"{name} starts at {first_update}, not before training"
        found.append(f"{name.removeprefix('val/')} {first:.2f} -> {last:.2f}")
    return ", ".join(found)


def inspected(folder: str) -> str:
    """Writes the page of every token, if the run recorded them, and returns a clause that names it."""
    if not (ROOT / folder / "inspect").is_dir():
        return ""
    page = f"{folder}/inspect.html"
    run(["-m", "grpo_lightning", "inspect", folder, "-o", page])
    return f"every token in {page}, "


def picture(folder: Path) -> None:
    """Draws the run's curves into its folder, where matplotlib is installed, and prints the file's name."""
    if importlib.util.find_spec("matplotlib"):
        plot(read_scalars(folder), folder / "curve.png")
        print(f"\n{(folder / 'curve.png').relative_to(ROOT)}")
