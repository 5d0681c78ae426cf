"""The last lines of a run: its scores, its checkpoints, and where to look."""

import math
import shlex
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning import disk
from grpo_lightning.plugins.console.display.lines import Scores, counted, duration, headline, number
from grpo_lightning.plugins.looking.inspector.record import FOLDER
from grpo_lightning.plugins.looking.loggers.trackio_logger import TrackioLogger
from grpo_lightning.plugins.looking.run_files.run_validations import read_validations
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.training.evaluation import Measurement, with_questions
from grpo_lightning.training.step_report import StepReport


class RunSummary(Callback):
    """Prints first and last validation, the best checkpoint, the time taken, where to look and how to continue.

    It also says in how many steps nothing was learned, and why. The lines come however the run ends in order: after
    its last step, an EarlyStopping, SIGTERM or Ctrl-C.
    """

    def __init__(self) -> None:
        self._first: tuple[int, Scores] | None = None
        self._last: tuple[int, Scores] | None = None
        self._measure = ""
        self._measures: list[str] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Starts the clock."""
        self._started = perf_counter()
        self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes with which step this start begins."""
        self._first_step = trainer.current_epoch

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Keeps the scores, with the number of steps done."""
        if not (scores := headline(trainer)):
            return
        # Scores of a resumed run with another grader cannot be compared.
        measures = [evaluation.measure for evaluation in pl_module.evaluations.values()]
        if self._measures != measures:
            self._measures = measures
            self._first = None
        self._measure = pl_module.measure
        self._last = 0 if trainer.sanity_checking else trainer.current_epoch + 1, scores
        self._first = self._first or self._last

    def state_dict(self) -> dict[str, Any]:
        """Returns the validations, so that a resumed run knows the first."""
        # Plain tuples, since a checkpoint is read without classes.
        first, last = map(plain, (self._first, self._last))
        return {"first": first, "last": last, "measure": self._measure, "measures": self._measures}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the validations of earlier starts."""
        self._first, self._last = map(restored, (state_dict["first"], state_dict["last"]))
        self._measure = state_dict.get("measure", "")
        self._measures = state_dict.get("measures", [])

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints the lines."""
        if disk.is_trial(trainer) or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        checkpoint = StepCheckpoint.find(trainer)
        steps = trainer.current_epoch
        start = f", from step {self._first_step + 1}" if self._first_step else ""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        (report,) = (callback for callback in callbacks if isinstance(callback, StepReport))
        remarks = [f"{text} ({count} of {steps - self._first_step} steps)" for text, count in report.remarks.items()]
        rows = {
            "done": f"{counted(steps, trainer.max_epochs, ' of ')} steps{start} in "
            f"{duration(perf_counter() - self._started)}",
            "validation": self._change(),
            "remarks": "; ".join(remarks),
            "curves": "; ".join(map(curves_of, trainer.loggers)),
            "tokens": f"grpo inspect {shlex.quote(str(folder))}" if (folder / FOLDER).is_dir() else "",
        }
        if checkpoint:
            rows |= {
                "best": best_of(checkpoint, folder),
                "saved": checkpoint.saved_in,
                "go on": go_on(trainer, checkpoint),
            }
        width = max(map(len, rows))
        rank_zero_info("\n".join(f"{name:<{width}}  {text}" for name, text in rows.items() if text))

    def _change(self) -> str:
        """Returns the scores of first and last validation, and their grader; empty without validation.

        `avg@8 0.39 ± 0.06 -> 0.96 ± 0.02 (256 questions), before training -> after step 60: fraction right by ...`

        Scores of other questions are not compared: there is only the last, and the reason.
        """
        if self._first is None or self._last is None:
            return ""
        (first_step, first_scores), (last_step, scores) = self._first, self._last
        start, end = (f"after step {step}" if step else "before training" for step in (first_step, last_step))
        earlier_scores = {name: score for name, score in first_scores.items() if name in scores and start != end}
        comparable = [name for name, score in earlier_scores.items() if score.questions == scores[name].questions]
        texts = {name: str(score) for name, score in scores.items()}
        texts |= {name: f"{first_scores[name]} -> {texts[name]}" for name in comparable}
        times = f"{start} -> {end}" if comparable else end
        if len(comparable) < len(earlier_scores):
            times += f" (not compared with {start}: other questions were asked)"
        return f"{with_questions(scores, texts)}, {times}: {self._measure}"


def plain(validation: tuple[int, Scores] | None) -> Any:
    """Returns a validation without classes, for a checkpoint."""
    if validation is None:
        return None
    step, scores = validation
    return step, {name: tuple(score) for name, score in scores.items()}


def restored(validation: Any) -> tuple[int, Scores] | None:
    """Returns a validation of a checkpoint; None if it has no intervals, as in version 0.2."""
    if validation is None or any(isinstance(score, float) for score in validation[1].values()):
        return None
    return validation[0], {name: Measurement(*score) for name, score in validation[1].items()}


def curves_of(logger: Logger) -> str:
    """Returns where a logger shows its curves: a command, a file, an address, or the logger's class and folder."""
    if isinstance(logger, TensorBoardLogger):
        return f"tensorboard --logdir {shlex.quote(str(Path(logger.log_dir)))}"
    if isinstance(logger, CSVLogger):
        return str(Path(logger.log_dir, "metrics.csv"))
    if isinstance(logger, TrackioLogger):
        return logger.address
    if isinstance(logger, MLFlowLogger):
        store = str(logger.experiment.tracking_uri)
        return store if store.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(store)}"
    address = getattr(getattr(logger, "experiment", None), "url", None)
    return str(address or f"{type(logger).__name__}{f' in {logger.save_dir}' if logger.save_dir else ''}")


def best_of(checkpoint: StepCheckpoint, folder: Path) -> str:
    """Returns the best checkpoint and its score; empty if no metric compares checkpoints."""
    path, score = checkpoint.best_model_path, checkpoint.best_model_score
    monitor = str(checkpoint.monitor)
    if monitor == "epoch" or not path:
        return ""
    if score is None:
        return path
    values = read_validations(folder).get(monitor)
    measurements = map(Measurement.of, values.by_step.values() if values else ())
    texts = [with_questions({monitor: best}) for best in measurements if math.isclose(best.mean, score, rel_tol=1e-6)]
    return f"{path} ({(texts or [f'{monitor} {number(float(score))}'])[-1]})"


def go_on(trainer: L.Trainer, checkpoint: StepCheckpoint) -> str:
    """Returns the command that continues the run; empty where there is nothing to continue from."""
    config = Path(trainer.default_root_dir) / "config.yaml"
    if not checkpoint.saved_in or not config.exists():
        return ""
    steps = trainer.current_epoch
    extension = f" --trainer.max_epochs {2 * steps}" if steps == (trainer.max_epochs or 0) else ""
    return f"grpo fit --config {shlex.quote(str(config))} --ckpt_path last{extension}"
