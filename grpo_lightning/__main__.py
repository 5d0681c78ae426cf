"""`python -m grpo_lightning` and the `grpo` console script."""

import os
import sys
from importlib import import_module

LIGHT = {"report": "grpo_lightning.inspect.report"}
"""The commands that need no torch, and the modules whose `main` runs them."""


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] and sys.argv[1] in LIGHT:
        sys.exit(import_module(LIGHT[sys.argv[1]]).main(sys.argv[2:]))
    # Read when torch starts its threads: threads that spin while they wait stall one another on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # As `python -m` does: a class or function of the user's is found in the working directory.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    from grpo_lightning.cli import run

    run()


if __name__ == "__main__":
    main()
