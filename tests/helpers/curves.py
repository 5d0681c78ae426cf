"""Runs made of curves alone, as Lightning logs them."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


def scalars(
    values: list[float], updates_per_step: int = 1, seconds: float = 1.0, name: str = "val/x"
) -> dict[str, list[tuple[int, float]]]:
    """A run validated after every exploration step."""
    logged = {"time/step": seconds, "rollout/tokens": 100.0}
    logged |= {"optim/updates": float(updates_per_step)} if updates_per_step > 1 else {}
    steps = range(len(values))
    return {key: [(step, value) for step in steps] for key, value in logged.items()} | {name: list(enumerate(values))}


def arm(*seeds: dict) -> dict[str, dict]:
    return {str(seed): run for seed, run in enumerate(seeds)}


def write(folder: Path, run: dict[str, list[tuple[int, float]]]) -> None:
    with SummaryWriter(str(folder)) as writer:
        for name, points in run.items():
            for step, value in points:
                writer.add_scalar(name, value, step)
