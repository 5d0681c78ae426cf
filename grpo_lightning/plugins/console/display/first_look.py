"""TensorBoard's first view: a group of five curves, the page of Custom Scalars, and the options in the tab HPARAMS."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.maths.metrics import with_bound
from grpo_lightning.plugins.looking.loggers.validation_values import is_validation
from grpo_lightning.plugins.looking.run_files.run_configs import earlier, flat, merged, shown
from grpo_lightning.training import internals
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import FIRST_LOOK

CURVES = {
    r"reward/mean": "1 reward",
    r"val/((?:[\w-]+/)?avg@\d+)": "2 val ",
    r"val/(greedy)": "3 val ",
    r"rollout/length_mean": "4 length",
    r"policy/entropy": "5 entropy",
}
"""Titles in the first group by regular expressions of the metrics. The groups of a match follow its title."""


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

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Shows the options in the tab HPARAMS, with earlier values where a run continued with other options."""
        earlier_params = [(until, flat(old)) for until, old in earlier(Path(self.log_dir))]
        options = merged([*earlier_params, (0, flat(params))], str)
        plain = {k: v if isinstance(v, (bool, int, float)) else shown(v) for k, v in options.items()}
        # Without the summary of an experiment, the tab begins with the options that differ between the runs.
        _, start, _ = hparams(plain, {})
        internals.summary_writer(self).add_summary(start)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs the metrics, and copies of the five curves."""
        super().log_metrics({**metrics, **copies(metrics)}, step)


def copies(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of the first group, by their names there."""
    matches = ((re.fullmatch(pattern, name), title) for name in metrics for pattern, title in CURVES.items())
    return {f"{FIRST_LOOK}/{title}{''.join(match.groups())}": metrics[match[0]] for match, title in matches if match}


class FirstLook(Callback):
    """Lays out TensorBoard's tab Custom Scalars, and writes each validation with its intervals into the tab Text."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Writes the metrics of the validation as a table."""
        if not is_validation(trainer):
            return
        step = -1 if trainer.sanity_checking else trainer.current_epoch
        measurements = pl_module.measurements()
        rows = [f"| {name} | {score} | {score.num_questions} |" for name, score in measurements.items()]
        text = "\n".join(["| metric | mean ± half the 95 % interval | questions |", "| --- | --- | --- |", *rows])
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("validation", text, step)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Writes the layout into every TensorBoard log, on rank 0."""
        names_by_title = charts(pl_module, validates=bool(trainer.limit_val_batches))
        if GRPOLoop.find(trainer).source.is_late and getattr(pl_module.explorer.engine, "draws_elsewhere", False):
            names_by_title["seconds waited"] = ["async/wait_rollouts", "async/wait_trainer"]
            names_by_title["overlap"] = ["async/overlap"]
        layout = {
            title: ["Multiline", [f"^{re.escape(name)}$" for name in names]] for title, names in names_by_title.items()
        }
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars({FIRST_LOOK: layout})


def charts(module: GRPOModule, validates: bool) -> dict[str, list[str]]:
    """Returns the metrics of each chart by its title, in the order to read them."""
    validations = {
        f"validation {name}".strip() + f": {evaluation.measure}": [
            f"val/{name}/{metric}".replace("//", "/")
            for metric in evaluation.metrics
            if "@" in metric or metric == "greedy"
        ]
        for name, evaluation in module.evaluations.items()
    }
    scorer = module.explorer.scorer
    # The range of any other reward is not known before the first step.
    grader = scorer.grader.name if scorer.grader.gives_verdicts else with_bound(scorer.grader.name)
    names_by_title = {
        "reward": ["reward/mean"],
        **(validations if validates else {}),
        "length, in tokens": ["rollout/length_mean", *(["val/length"] if validates else [])],
        f"length, right and wrong by {grader}": ["rollout/length_right", "rollout/length_wrong"],
        f"right by {grader} and finished, truncated": ["rollout/right_and_finished", "rollout/truncated"],
        "KL, in nats per token": [*(["policy/kl_ref"] if module.reference is not None else []), "policy/kl_old"],
        "clipped fraction of tokens": ["policy/clip_low", "policy/clip_high"],
        "entropy, in nats per token": ["policy/entropy"],
        "seconds per step": ["time/step", "time/explore", "time/reward", "time/logp", "time/optimise"],
    }
    # All curves of a run have one colour: with several runs, two curves per chart can be told apart, hardly more.
    return {
        f"{title} ({start // 2 + 1})" if start else title: names[start : start + 2]
        for title, names in names_by_title.items()
        for start in range(0, len(names), 2)
    }
