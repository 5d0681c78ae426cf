"""The demonstration: makes a tiny policy, trains it with GRPO on a CPU, and prints what changed and where to look.

python tools/demo.py        (or `make demo`, which installs first)
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from plot_run import plot

from grpo_lightning.inspect.scalars import read_scalars, validation_names

ROOT = Path(__file__).resolve().parents[1]
POLICY, RUN, CONFIG = "runs/tiny_policy", "runs/quickstart", "configs/quickstart.yaml"
PAGE = f"{RUN}/inspect.html"
STAGES = (
    (f"1/2 Teaching a small language model to add, badly, in {POLICY}", ["tools/make_tiny_policy.py", "--out", POLICY]),
    (f"2/2 GRPO, into {RUN}", ["-m", "grpo_lightning", "fit", "--config", CONFIG]),
)


def run(arguments: list[str]) -> None:
    """Runs Python with `arguments` in the repository's root; a failure ends the demonstration."""
    # Idle OpenMP threads sleep: spinning, they would take the cores from each other.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    code = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(f"demo: failed with exit code {code}: python {' '.join(arguments)}")


def summary(seconds: float) -> str:
    """First and last validation in one line."""
    scalars = read_scalars(ROOT / RUN)
    changes = []
    for name in validation_names(scalars)[:2]:
        (first_step, first), *_, (_, last) = scalars[name]
        assert first_step == -1, f"{name} starts at {first_step}, not before training"
        changes.append(f"{name.removeprefix('val/')} {first:.2f} -> {last:.2f}")
    pages = f"every token in {PAGE}, " if (ROOT / PAGE).exists() else ""
    return f"{', '.join(changes)} in {seconds:.0f} s; see {pages}the curves with tensorboard --logdir runs"


def main() -> None:
    """Runs the stages and prints the result."""
    started = time.perf_counter()
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    for what, arguments in STAGES:
        print(f"\n{what}: python {' '.join(arguments)}", flush=True)
        run(arguments)
    seconds = time.perf_counter() - started
    if (ROOT / RUN / "inspect").is_dir():
        run(["-m", "grpo_lightning", "inspect", RUN, "-o", PAGE])
    if importlib.util.find_spec("matplotlib"):
        plot(read_scalars(ROOT / RUN), ROOT / RUN / "curve.png")
        print(f"\n{RUN}/curve.png")
    print(summary(seconds))


if __name__ == "__main__":
    main()
