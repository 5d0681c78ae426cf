"""Runs made of curves alone, as Lightning logs them."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


def scalars(
    values: list[float], updates_per_step: int = 1, seconds: float = 1.0, name: str = "val/x"
) -> dict[str, list[tuple[int, float]]]:
    """A run validated after every exploration step, as Lightning logs it: at the step's last update."""
    updates = range(len(values) * updates_per_step)
    lasts = [(step + 1) * updates_per_step - 1 for step in range(len(values))]
    return {
        "epoch": [(update, float(update // updates_per_step)) for update in updates],
        "time/step": [(last, seconds) for last in lasts],
        "rollout/tokens": [(last, 100.0) for last in lasts],
        name: list(zip(lasts, values, strict=True)),
    }


def arm(*seeds: dict) -> dict[str, dict]:
    return {str(seed): run for seed, run in enumerate(seeds)}


def write(folder: Path, run: dict[str, list[tuple[int, float]]]) -> None:
    with SummaryWriter(str(folder)) as writer:
        for name, points in run.items():
            for step, value in points:
                writer.add_scalar(name, value, step)
