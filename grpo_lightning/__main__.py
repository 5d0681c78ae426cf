"""`python -m grpo_lightning` and the `grpo` console script."""


def main() -> None:
    """Runs the command line."""
    from grpo_lightning.cli import run

    run()


if __name__ == "__main__":
    main()
