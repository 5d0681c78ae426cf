"""The command line: `grpo fit|validate|test|predict`."""

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import transformers.utils.logging
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

import grpo_lightning.process_supervision
import grpo_lightning.rewards
import grpo_lightning.rewards.learned
import grpo_lightning.sequence_surrogates
import grpo_lightning.target_probability
import grpo_lightning.tasks  # noqa: F401  (what is imported here is known by its short name in YAML)
from grpo_lightning.callbacks.checkpoint import AtomicCheckpointIO, StepCheckpoint, refuse_overwriting
from grpo_lightning.callbacks.completions import SampledCompletions
from grpo_lightning.callbacks.predictions import PredictionWriter
from grpo_lightning.callbacks.progress import StepProgressBar
from grpo_lightning.data import PromptDataModule
from grpo_lightning.loop import GRPOLoop
from grpo_lightning.module import GRPOModule
from grpo_lightning.rewards.scorer import RewardFailure
from grpo_lightning.types import UsageError

INSTEAD = {
    "gradient_clip_val": "model.grad_clip",
    "gradient_clip_algorithm": "model.grad_clip (a norm)",
    "max_steps": "trainer.max_epochs (exploration steps)",
    "max_time": "trainer.max_epochs (exploration steps)",
}
"""Trainer options that do not go with manual optimisation or exact resuming, and what to use."""


class Parser(LightningArgumentParser):
    """A parser that says what is wrong in a line, and points to --help for the options."""

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: 80 lines of options would hide the one that says what is wrong."""


class GRPOCLI(LightningCLI):
    """LightningCLI with the loop, checkpoints, logging and output of grpo_lightning."""

    def __init__(self, args: Sequence[str] | None = None) -> None:
        super().__init__(
            GRPOModule,
            PromptDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            trainer_defaults={
                "default_root_dir": "runs/grpo",
                "max_epochs": 100,
                "log_every_n_steps": 1,
                "num_sanity_val_steps": 0,
            },
            parser_class=Parser,
            args=list(args) if args is not None else None,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(GRPOLoop, "loop")
        parser.add_lightning_class_args(StepCheckpoint, "checkpoint")
        parser.add_lightning_class_args(SampledCompletions, "completions")
        parser.add_lightning_class_args(PredictionWriter, "predictions")
        # GRPOModule's own defaults, spelled out for --help and --print_config.
        parser.set_defaults(
            {
                "model.engine": {"class_path": "NativeEngine"},
                "model.advantage": {"class_path": "GroupStd"},
                "model.old_policy": {"class_path": "RecordedLogp"},
                "model.reference": {"class_path": "FrozenCopy"},
                "model.sampling": {},
                "loop.stop": {"class_path": "FixedPasses"},
                "model.objective": {
                    "surrogate": {"class_path": "Clipped"},
                    "kl": {"class_path": "K3"},
                    "weighting": {"class_path": "SequenceMean"},
                },
            }
        )
        parser.link_arguments("seed_everything", "loop.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    def before_instantiate_classes(self) -> None:
        trainer = self.config[self.subcommand].trainer
        for name, instead in INSTEAD.items():
            if trainer.get(name) not in (None, -1):
                raise UsageError(f"trainer.{name}={trainer[name]}: use {instead}")
        if trainer.accumulate_grad_batches != 1:
            raise UsageError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: use loop.max_tokens; it sets the "
                "memory of a forward and backward and never changes the gradient"
            )
        if trainer.check_val_every_n_epoch == 0:
            raise UsageError(
                "trainer.check_val_every_n_epoch=0: give 1 or more, or set trainer.limit_val_batches=0 to fit without "
                "validation"
            )
        if str(trainer.precision).startswith("16"):
            raise UsageError(
                f"trainer.precision={trainer.precision}: use 32-true, bf16-mixed or bf16-true; float16 overflows"
            )

    def after_instantiate_classes(self) -> None:
        # Mistakes in the data, the model's folder or the run's folder show before anything is written.
        stage, trainer = str(self.subcommand), self.trainer
        self._check_checkpoint(stage)
        if stage == "fit" and self.config[stage].ckpt_path is None and trainer.checkpoint_callback is not None:
            refuse_overwriting(Path(trainer.default_root_dir) / "checkpoints")
        if stage == "fit":
            GRPOLoop.of(trainer).check(self.model)
        self.model.policy.check()
        self.datamodule.load(stage, self.model, validates=trainer.limit_val_batches != 0)

    def _check_checkpoint(self, stage: str) -> None:
        """A checkpoint that is named must exist; `fit --ckpt_path last` alone may start a run as well."""
        path = self.config[stage].ckpt_path
        if path is None or "://" in path or (path == "last" and stage == "fit"):
            return
        folder = Path(self.trainer.default_root_dir) / "checkpoints"
        if not ((folder / "last.ckpt") if path == "last" else Path(path)).exists():
            raise UsageError(
                f"ckpt_path={path}: there is no such checkpoint. Give its path, or `last` for {folder / 'last.ckpt'}"
            )

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self.config_init[self.subcommand].trainer
        if config.logger in (None, True):
            kwargs["logger"] = TensorBoardLogger(config.default_root_dir, name="", version="", default_hp_metric=False)
        progress_bar = [] if config.enable_progress_bar is False else [StepProgressBar()]
        kwargs["callbacks"] = [*progress_bar, *(config.callbacks or [])]
        if config.enable_checkpointing is False:
            self._parser(self.subcommand).callback_keys.remove("checkpoint")
        kwargs["plugins"] = [AtomicCheckpointIO(), *(config.plugins or [])]
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError) as error:
            raise UsageError(f"trainer: {error}") from error


class SaveConfig(SaveConfigCallback):
    """Keeps the run's configuration: config.yaml, and TensorBoard's hparams for comparing runs."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Nothing: the model may not load, and a `validate` in a run's folder must leave its config.yaml alone."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(trainer.logger, TensorBoardLogger) and trainer.is_global_zero:
            assert isinstance(pl_module, GRPOModule)
            config = self.config.as_dict()
            options = flat({key: config[key] for key in ("model", "data", "loop")})
            # The HPARAMS tab shows the last value of these beside the options.
            shown = dict.fromkeys(["reward/mean", *(f"val/{name}" for name in pl_module.val_metrics)], 0.0)
            for summary in hparams(options, shown):
                trainer.logger.experiment._get_file_writer().add_summary(summary)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"loop": {"mu": 1}} -> {"loop.mu": 1}; what is no number, text or truth value becomes text."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {prefix: tree if isinstance(tree, (bool, int, float, str)) else str(tree)}
    return {
        key: value
        for name, part in tree.items()
        for key, value in flat(part, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def run(args: Sequence[str] | None = None) -> None:
    """Runs the command line; the user's mistakes end it with one message and exit code 2."""
    quieten()
    try:
        GRPOCLI(args)
    except (RewardFailure, FloatingPointError) as error:
        sys.exit(fail(error, code=1))
    except Exception as error:
        mistake = usage_error(error)
        if mistake is None:
            raise
        sys.exit(fail(mistake, code=2))


def quieten() -> None:
    """Silences what libraries say that helps nobody here."""
    # Lightning 2.6 asks torch 2.13 in a way torch calls old.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
    # The reference is meant to be in eval mode.
    warnings.filterwarnings("ignore", message="Found .* in eval mode at the start of training")
    # What the loop logs is of all ranks already.
    warnings.filterwarnings("ignore", message="It is recommended to use .self.log.*sync_dist")
    # An advertisement.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "litlogger" not in r.getMessage())
    transformers.utils.logging.disable_progress_bar()


def usage_error(error: BaseException | None) -> UsageError | None:
    """The user's mistake behind `error`: jsonargparse raises its own where an argument may also be None."""
    while error is not None:
        if isinstance(error, UsageError):
            return error
        error = error.__cause__
    return None


def fail(error: Exception, code: int) -> int:
    """Says what went wrong on standard error."""
    print(f"grpo: error: {error}", file=sys.stderr)
    return code
