"""Run by test_invariance: `gradient_of_ranks.py RANKS FOLDER` saves the gradients of two steps of two updates."""

import sys
from pathlib import Path

import torch
from fitting import Gradients, fit

from grpo_lightning.objective import Objective


def main() -> None:
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    seen = Gradients()
    strategy = "ddp" if ranks > 1 else "auto"
    module = fit(
        folder / f"run{ranks}",
        [seen],
        # The budget makes packs of one or two rows, and not as many on both ranks.
        loop={"max_tokens": 30, "minibatches": 2},
        trainer={"max_epochs": 2, "devices": ranks, "strategy": strategy, "limit_val_batches": 1.0},
        objective=Objective(beta=0.1),
    )
    if module.global_rank == 0:
        torch.save(seen.updates, folder / f"{ranks}.pt")


if __name__ == "__main__":
    main()
