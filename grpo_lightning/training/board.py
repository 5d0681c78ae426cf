"""The table of a run's metrics, and rewinding loggers to the step that a run resumes from."""

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

EVENTS = "events.out.tfevents.*"
"""Pattern of the names of TensorBoard's files."""


class RunCSVLogger(CSVLogger):
    """A CSVLogger that continues its `metrics.csv` when the run is resumed.

    Args:
        save_dir: Folder of the file; by default the folder of the run.
        name: Folder in `save_dir`.
        version: Folder in `name`.
    """

    def __init__(
        self, save_dir: str | None = None, name: str | None = "", version: int | str | None = "", **kwargs: Any
    ) -> None:
        super().__init__(save_dir or "", name, version, **kwargs)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the file; Lightning's would delete an existing file."""
        if self._experiment is None:
            rows = disk.table(Path(self.log_dir, "metrics.csv"))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory .* is not empty")
                writer: Any = super().experiment
            writer.metrics = rows
            writer.save()
        return self._experiment

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the hyperparameters are in `config.yaml`."""


def rewind(logger: Logger, steps: int) -> None:
    """Removes what earlier starts have logged after the first `steps` steps, and their row in HPARAMS.

    A run may go on from any of its checkpoints. Its curves, and its row in HPARAMS, then come from the newest start.
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
        has_options = any(value.tag == "_hparams_/session_start_info" for value in event.summary.value)
        return not event.HasField("summary") or (event.step < steps and not has_options)

    folder = Path(logger.log_dir)
    # TensorBoard would read half-written files too.
    for partial in folder.glob(f"{EVENTS}{disk.PARTIAL}"):
        partial.unlink()
    # The file that this start writes to is open, and stays as it is.
    open_name = internals.event_file(logger).name
    for file in disk.whole_files(folder, EVENTS):
        events = [] if file.name == open_name else [*RawEventFileLoader(str(file)).Load()]
        remaining = [event for event in events if stays(Event.FromString(event))]
        if len(remaining) < len(events):
            with disk.beside(file) as partial, partial.open("wb") as stream:
                for event in remaining:
                    RecordWriter(stream).write(event)
