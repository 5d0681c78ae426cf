"""The loggers of a run: TensorBoard with the curves to read first at the top, or a table; and their going back."""

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event

from grpo_lightning.training import disk, internals
from grpo_lightning.types import FIRST_LOOK

CURVES = {
    r"reward/mean": "1 reward",
    r"val/(?P<shown>avg@\d+)": "2 val ",
    r"val/(?P<shown>greedy)": "3 val ",
    r"rollout/length_mean": "4 length",
    r"policy/entropy": "5 entropy",
}
"""The metrics in that group, as regular expressions, and what they are called there."""


class Board(TensorBoardLogger):
    """A TensorBoardLogger that logs five curves twice: TensorBoard sorts by name, and would open on `optim/`.

    The copies are the first group of the tabs Time Series and Scalars, and the columns of the tab HPARAMS.

    Args:
        save_dir: Where the event files are; by default the folder of the run.
        name: Folder in it.
        version: Folder in that.
        default_hp_metric: Log a metric `hp_metric`, which is always -1.
    """

    def __init__(
        self,
        save_dir: str | None = None,
        name: str | None = "",
        version: int | str | None = "",
        default_hp_metric: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir or "", name, version, default_hp_metric=default_hp_metric, **kwargs)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs the metrics, and the copies."""
        super().log_metrics({**metrics, **copies(metrics)}, step)


def copies(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the metrics that are in the first group, by their names there."""
    found = {}
    for name, value in metrics.items():
        for pattern, title in CURVES.items():
            if match := re.fullmatch(pattern, name):
                found[f"{FIRST_LOOK}/{title}{match.groupdict().get('shown', '')}"] = value
    return found


class RunCSVLogger(CSVLogger):
    """A CSVLogger that goes on with its `metrics.csv` when the run is resumed.

    Args:
        save_dir: Where the file is; by default the folder of the run.
        name: Folder in it.
        version: Folder in that.
    """

    def __init__(
        self, save_dir: str | None = None, name: str | None = "", version: int | str | None = "", **kwargs: Any
    ) -> None:
        super().__init__(save_dir or "", name, version, **kwargs)

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.log_dir, "metrics.csv")

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """What writes the file. Lightning's would delete what there is."""
        if self._experiment is None:
            rows = disk.table(self.path)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory .* is not empty")
                made: Any = super().experiment
            made.metrics = rows
            made.save()
        return self._experiment

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are in `config.yaml`."""

    def rewind(self, steps: int) -> None:
        """Removes the rows of later steps."""
        rows = disk.table(self.path)
        kept = [row for row in rows if int(row["step"]) < steps]
        if len(kept) < len(rows):
            self.path.unlink()
            self.experiment.metrics = kept
            self.experiment.save()


def is_in(folder: Path | str, logger: Logger) -> bool:
    """Whether a logger writes files of curves into the folder itself."""
    return isinstance(logger, TensorBoardLogger | CSVLogger) and Path(logger.log_dir) == Path(folder)


def rewind(logger: Logger, steps: int) -> None:
    """Lets a logger forget what earlier starts have logged of steps that this one does again, and their options.

    A run goes on from any of its checkpoints. Its curves, and its row in HPARAMS, are then those of the newest start.

    Args:
        logger: Its other files are not touched.
        steps: Exploration steps done.
    """
    if isinstance(logger, RunCSVLogger):
        logger.rewind(steps)
    if not isinstance(logger, TensorBoardLogger):
        return
    own = internals.event_file(logger)
    for file in sorted(Path(logger.log_dir).glob("events.out.tfevents.*")):
        records = [] if file.name == own.name else list(_records(file.read_bytes()))
        kept = [record for record in records if _stays(Event.FromString(record[12:-4]), steps)]
        if len(kept) < len(records):
            with disk.beside(file) as partial:
                partial.write_bytes(b"".join(kept))


def _records(data: bytes) -> Iterator[bytes]:
    """The records of an event file: the length and its checksum in 12 bytes, an event, and its checksum in 4."""
    at = 0
    while at + 12 <= len(data):
        end = at + 16 + int.from_bytes(data[at : at + 8], "little")
        if end <= len(data):  # else it was cut off
            yield data[at:end]
        at = end


def _stays(event: Event, steps: int) -> bool:
    options = any(value.tag == "_hparams_/session_start_info" for value in event.summary.value)
    return not event.HasField("summary") or (event.step < steps and not options)
