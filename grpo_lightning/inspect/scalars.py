"""The curves of a run, from its event files."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lightning.types import FIRST_LOOK

Scalars = dict[str, list[tuple[int, float]]]
"""By name: (update, value), in the order of the updates."""


def read_scalars(folder: Path | str) -> Scalars:
    """Every scalar of a run as (step, value), by step. Of several values at a step, as in a resumed run, the last.

    The copies that `Board` puts first in TensorBoard are left out.
    """
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for file in Path(folder).glob("events.out.tfevents.*"):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            if name.startswith(f"{FIRST_LOOK}/"):
                continue
            values = found.setdefault(name, {})
            for event in events.Scalars(name):
                if event.step not in values or values[event.step][0] <= event.wall_time:
                    values[event.step] = (event.wall_time, event.value)
    return {name: [(step, values[step][1]) for step in sorted(values)] for name, values in sorted(found.items())}


def validation_names(scalars: Scalars) -> list[str]:
    """`val/avg@k`, `val/pass@1` and `val/maj@k` with the run's k; empty if it never validated."""
    k = next((name.removeprefix("val/avg@") for name in scalars if name.startswith("val/avg@")), None)
    return [] if k is None else [f"val/avg@{k}", "val/pass@1", f"val/maj@{k}"]
