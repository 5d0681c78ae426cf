"""The demonstration: makes a tiny policy, validates it, trains it with GRPO on a CPU, and prints what changed.

python tools/demo.py        (or `make demo`, which installs first)
"""

import shutil
import time

from stages import ROOT, changes, picture, run_stages

POLICY, RUN, CONFIG = "runs/tiny_policy", "runs/quickstart", "configs/quickstart.yaml"
STAGES = (
    (f"Teaching a small language model to add, badly, in {POLICY}", ["tools/make_tiny_policy.py", "--out", POLICY]),
    (f"Validating it, into {RUN}", ["-m", "grpo_lightning", "validate", "--config", CONFIG]),
    ("GRPO", ["-m", "grpo_lightning", "fit", "--config", CONFIG]),
)


def main() -> None:
    """Runs the stages and prints the result."""
    started = time.perf_counter()
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    run_stages(STAGES)
    seconds = time.perf_counter() - started
    picture(ROOT / RUN)
    print(f"{changes(ROOT / RUN)} in {seconds:.0f} s; see it: tensorboard --logdir runs")


if __name__ == "__main__":
    main()
