"""`python -m grpo_lightning` and the `grpo` console script."""

import os


def main() -> None:
    """Runs the command line."""
    # Read when torch starts its threads: threads that spin while they wait stall one another on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from grpo_lightning.cli import run

    run()


if __name__ == "__main__":
    main()
