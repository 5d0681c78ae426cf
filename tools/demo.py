"""The demonstration: makes a tiny policy, trains it with GRPO on a CPU, and prints what changed.

python tools/demo.py        (or `make demo`, which installs first)
"""

import shutil
import time

from stages import ROOT, run_stages, show, summary

POLICY, RUN, CONFIG = "runs/tiny_policy", "runs/quickstart", "configs/quickstart.yaml"
STAGES = (
    (f"Teaching a small language model to add, badly, in {POLICY}", ["tools/make_tiny_policy.py", "--out", POLICY]),
    (f"GRPO, into {RUN}", ["-m", "grpo_lightning", "fit", "--config", CONFIG]),
)


def main() -> None:
    """Runs the stages and prints the result."""
    started = time.perf_counter()
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    run_stages(STAGES)
    seconds = time.perf_counter() - started
    show(RUN)
    print(summary(RUN, seconds))


if __name__ == "__main__":
    main()
