"""The table of a run's metrics, and the going back of its loggers when the run goes back."""

import warnings
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from grpo_lightning import disk
from grpo_lightning.training import internals

EVENTS = "events.out.tfevents.*"  # the names of TensorBoard's files


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
    @rank_zero_experiment
    def experiment(self) -> Any:
        """What writes the file. Lightning's would delete what there is."""
        if self._experiment is None:
            rows = disk.table(Path(self.log_dir, "metrics.csv"))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory .* is not empty")
                made: Any = super().experiment
            made.metrics = rows
            made.save()
        return self._experiment

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are in `config.yaml`."""


def rewind(logger: Logger, steps: int) -> None:
    """Lets a logger forget what earlier starts have logged after the first `steps`, which are done, and their options.

    A run goes on from any of its checkpoints. Its curves, and its row in HPARAMS, are then those of the newest start.
    """
    if isinstance(logger, RunCSVLogger):
        writer = logger.experiment
        path = Path(writer.metrics_file_path)
        writer.metrics = [row for row in disk.table(path) if int(row["step"]) < steps]
        path.unlink(missing_ok=True)
        writer.save()
    if not isinstance(logger, TensorBoardLogger):
        return

    def stays(event: Event) -> bool:
        options = any(value.tag == "_hparams_/session_start_info" for value in event.summary.value)
        return not event.HasField("summary") or (event.step < steps and not options)

    own, folder = internals.event_file(logger), Path(logger.log_dir)
    for partial in folder.glob(f"{EVENTS}{disk.PARTIAL}"):
        partial.unlink()  # TensorBoard would read it too
    for file in disk.whole_files(folder, EVENTS):
        events = [] if file.name == own.name else [*RawEventFileLoader(str(file)).Load()]
        kept = [event for event in events if stays(Event.FromString(event))]
        if len(kept) < len(events):
            with disk.beside(file) as partial, partial.open("wb") as stream:
                for event in kept:
                    RecordWriter(stream).write(event)
