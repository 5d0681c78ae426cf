"""`python -m grpo_lightning` and the `grpo` console script."""

import os
import sys

from grpo_lightning.command.overview import answer


def main() -> None:
    """Runs the command line."""
    code = answer(sys.argv[1:])
    if code is not None:
        sys.exit(code)
    # Read when torch starts its threads: threads that spin while they wait stall one another on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # As `python -m` does: a class or function of the user's is found in the working directory.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    from grpo_lightning.cli import run

    run()


if __name__ == "__main__":
    main()
