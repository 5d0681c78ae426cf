"""The curves of a run, from its event files or, where it has none, its table."""

import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from grpo_lightning.disk import table, whole_files
from grpo_lightning.types import FIRST_LOOK

Scalars = dict[str, list[tuple[int, float]]]
"""By name: (x, value), x rising: the exploration step from 0, and -1 before training."""

EVENTS = "events.out.tfevents.*"
"""The files of TensorBoard, in the folder of a run."""
TABLE = "metrics.csv"
"""The file of a CSVLogger, in the folder of a run."""

RENAMED = {"reward/zero_spread": "reward/frac_zero_std", "rollout/given": "rollout/context"}
"""The names of scalars by those that version 0.2 logged."""


def read_scalars(folder: Path | str) -> Scalars:
    """Reads every scalar of a run as (step, value), by step.

    Of several values at a step, as in a resumed run, the last counts. Scalars of version 0.2 have their new names. The
    copies that `Board` puts first in TensorBoard are left out.
    """
    values_by_name: dict[str, dict[int, float]] = {}
    files = whole_files(Path(folder), EVENTS)
    for name, step, _, value in sorted(_events(files) if files else _rows(Path(folder, TABLE)), key=itemgetter(2)):
        values_by_name.setdefault(RENAMED.get(name, name), {})[step] = value
    return {name: sorted(values.items()) for name, values in sorted(values_by_name.items())}


def _events(files: list[Path]) -> Iterator[tuple[str, int, float, float]]:
    # This import takes a second, which --help need not wait for.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            if not name.startswith(f"{FIRST_LOOK}/"):
                yield from ((name, event.step, event.wall_time, event.value) for event in events.Scalars(name))


def _rows(path: Path) -> Iterator[tuple[str, int, float, float]]:
    for number, row in enumerate(table(path)):
        step = int(row.pop("step"))
        yield from ((name, step, number, float(value)) for name, value in row.items())


def validation_names(scalars: Scalars) -> list[str]:
    """Returns `val/avg@k`, `val/greedy` and `val/maj@k` with the run's k, then `val/NAME/avg@k` of the others."""
    k = next((name.removeprefix("val/avg@") for name in scalars if name.startswith("val/avg@")), None)
    main = [] if k is None else [f"val/avg@{k}", "val/greedy", f"val/maj@{k}"]
    return main + [name for name in scalars if re.fullmatch(r"val/[\w-]+/avg@\d+", name)]
