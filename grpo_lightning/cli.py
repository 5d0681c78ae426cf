"""The command line: `grpo fit|validate|test|predict|plan`; `inspect`, `report` and `export` are apart."""

import logging
import pkgutil
import random
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers.utils.logging
from jsonargparse.typing import import_object
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.elastic.multiprocessing.errors import record

import grpo_lightning
from grpo_lightning.command import early
from grpo_lightning.command.imports import refusal
from grpo_lightning.command.launched_ranks import LaunchedRanks
from grpo_lightning.command.mistakes import refused_argument
from grpo_lightning.command.overview import COMMANDS
from grpo_lightning.command.parser import Parser
from grpo_lightning.rewards.scorer import RewardFailure
from grpo_lightning.training import disk, internals
from grpo_lightning.training.board import Board, RunCSVLogger, is_in
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint, checkpoints_of, refuse_overwriting
from grpo_lightning.training.callbacks.completions import SampledCompletions
from grpo_lightning.training.callbacks.config import SaveConfig
from grpo_lightning.training.callbacks.interrupts import EXIT_CODE
from grpo_lightning.training.callbacks.layout import FirstLook
from grpo_lightning.training.callbacks.lines import StepLines
from grpo_lightning.training.callbacks.predictions import PredictionWriter
from grpo_lightning.training.callbacks.progress import StepProgressBar, keep_messages_off_bars
from grpo_lightning.training.callbacks.summary import RunSummary
from grpo_lightning.training.callbacks.time_limit import StepTimer
from grpo_lightning.training.checkpoint_files import AtomicCheckpointIO, read_checkpoint
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.loop import PASSES, GRPOLoop
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.optimizer_options import refuse_metric
from grpo_lightning.training.precision import validate_precision
from grpo_lightning.training.restoring import refuse_half_a_step
from grpo_lightning.training.stale import StaleSource as StaleSource  # its name is known in YAML
from grpo_lightning.training.strategy import refuse_fsdp1
from grpo_lightning.types import UsageError, at_least

PLUGINS = ("fast", "verifier", "learned", "process", "conversations", "vllm")
FAMILIES = ("maths", "tasks", "rewards", "policy", "engines", *(f"plugins.{name}" for name in PLUGINS))
"""The folders of the families. A class in any of their files is known by its short name in YAML."""

RECORDS = "inspect"
"""The section of the inspector, and the folder of its records in that of the run."""

REPLACED_BY = {
    "gradient_clip_val": "model.grad_clip",
    "gradient_clip_algorithm": "model.grad_clip (a norm)",
    "max_steps": "trainer.max_epochs (exploration steps)",
    "limit_train_batches": f"trainer.max_epochs for fewer steps; {PASSES}",
    "overfit_batches": "few questions in data.task, for as many steps as it takes",
    "reload_dataloaders_every_n_epochs": "nothing: every step samples anew",
    "barebones": "trainer.logger=false and trainer.enable_checkpointing=false; it would log no metric either",
}
"""Trainer options that conflict with manual optimisation or exact resuming, and what to use instead."""


NOTHING = {"overfit_batches": 0, "reload_dataloaders_every_n_epochs": 0, "barebones": False}
"""The default of those whose default is not None."""


class GRPOCLI(LightningCLI):
    """LightningCLI with the loop, checkpoints, logging and messages of grpo_lightning."""

    def __init__(self, args: Sequence[str] | None = None) -> None:
        self._called = (sys.argv[1:] if args is None else [*args])[:1]
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
                "enable_model_summary": False,  # the table of the memory has its numbers
            },
            parser_class=Parser,
            parser_kwargs={name: {"description": COMMANDS[name].summary} for name in self.subcommands()},
            args=list(args) if args is not None else None,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the callbacks, the defaults and the links between seeds."""
        import_families()
        parser.add_lightning_class_args(GRPOLoop, "loop")
        parser.add_lightning_class_args(StepCheckpoint, "checkpoint")
        parser.add_lightning_class_args(SampledCompletions, "completions")
        parser.add_lightning_class_args(grpo_lightning.Inspector, "inspect")
        parser.add_lightning_class_args(PredictionWriter, "predictions")
        parser.add_lightning_class_args(grpo_lightning.MemoryReport, "memory")
        # GRPOModule's own defaults, spelled out for --help and --print_config.
        parser.set_defaults(
            {
                "model.engine": {"class_path": "NativeEngine"},
                "model.advantage": {"class_path": "GroupStd"},
                "model.old_policy": {"class_path": "RecordedLogp"},
                "model.sampling": {},
                "model.val_sampling": {},
                "model.validation": {},
                "loop.stop": {"class_path": "FixedPasses"},
                "loop.source": {"class_path": "Synchronous"},
                "model.objective": {
                    "surrogate": {"class_path": "Clipped"},
                    "kl": {"class_path": "K3"},
                    "weighting": {"class_path": "SequenceMean"},
                    "correction": {"class_path": "NoCorrection"},
                },
            }
        )
        parser.link_arguments("seed_everything", "loop.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Reads the options; refuses a seed that is none, from which other seeds follow."""
        super().parse_arguments(parser, args)
        seed = self.config[self.config.subcommand].seed_everything
        if isinstance(seed, bool) or not 0 <= seed < 2**32:
            raise UsageError(
                f"seed_everything={str(seed).lower()}: give a number from 0 to {2**32 - 1}, with which the run can be "
                f"repeated and continued, such as {random.SystemRandom().randrange(10_000)}"
            )

    def before_instantiate_classes(self) -> None:
        """Refuses options that this program replaces."""
        trainer = self.config[self.subcommand].trainer
        for name, instead in REPLACED_BY.items():
            if trainer.get(name) not in (None, -1) and not (name in NOTHING and trainer[name] == NOTHING[name]):
                raise UsageError(f"trainer.{name}={trainer[name]}: use {instead}")
        if trainer.accumulate_grad_batches != 1:
            raise UsageError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: use loop.max_tokens; it sets the "
                "memory of a forward and backward and never changes the gradient"
            )
        lr = (self.config[self.subcommand].model.optimizer.get("init_args") or {}).get("lr")
        at_least("model.optimizer.lr", lr if isinstance(lr, (int, float)) else None, 0)
        scheduler = self.config[self.subcommand].model.lr_scheduler
        if scheduler is not None:
            refuse_metric(import_object(scheduler.class_path))
        if trainer.check_val_every_n_epoch == 0:
            raise UsageError(
                "trainer.check_val_every_n_epoch=0: give 1 or more, or set trainer.limit_val_batches=0 to fit without "
                "validation"
            )
        validate_precision(trainer.precision)
        refuse_fsdp1(trainer.strategy)

    def instantiate_classes(self) -> None:
        """Makes the classes of the configuration; what one of them refuses is the user's mistake."""
        try:
            super().instantiate_classes()
        except (ValueError, ModuleNotFoundError, MisconfigurationException) as error:
            raise usage_error(error) or refused_argument(error) from error

    def after_instantiate_classes(self) -> None:
        """Reads data and weights."""
        # Mistakes in the data, the folder of the model or that of the run show before anything is written.
        stage, trainer = str(self.subcommand), self.trainer
        self.model.connect(self.datamodule)
        self._validate_checkpoint(stage)
        if stage == "fit":
            folder, path = checkpoints_of(trainer), self.config_init[stage].ckpt_path
            is_own = path is not None and ("://" in path or Path(path).resolve().parent == folder.resolve())
            if not is_own and StepCheckpoint.find(trainer) is not None:
                refuse_overwriting(folder)
            loop = GRPOLoop.find(trainer)
            loop.validate(self.model)
            loop.validate_trainer(trainer)
            try_optimizer(self.model)
        self.model.policy.check()
        self.model.read_questions(self.datamodule, stage, validates=trainer.limit_val_batches != 0)
        # Lightning starts its loggers, which write, before it asks for the weights.
        with trainer.strategy.tensor_init_context(), trainer.strategy.precision_plugin.module_init_context():
            self.model.load(trainer.strategy.precision_plugin)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """The parser of a subcommand; without arguments, which take a while to add, where another one is called."""
        if self._called != [subcommand] and {*self._called} & {*self.subcommands()}:
            return self.init_parser(**kwargs)
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def _validate_checkpoint(self, stage: str) -> None:
        """Refuses a checkpoint that is missing, of another program, or without steps left to do.

        Only `fit --ckpt_path last` may start a new run instead, and prints that it does.
        """
        given, last = self.config[stage].ckpt_path, checkpoints_of(self.trainer) / "last.ckpt"
        if given is None or "://" in given:
            return
        path = last if given == "last" else Path(given)
        if not path.exists():
            if given != "last" or stage != "fit":
                raise UsageError(early.no_such_checkpoint(given if given != "last" else f"last ({last})"))
            elsewhere = sorted(Path(self.trainer.default_root_dir).glob("lightning_logs/*/checkpoints/last.ckpt"))
            if elsewhere:
                raise UsageError(f"ckpt_path=last: {last} does not exist. Give --ckpt_path {elsewhere[-1]}")
            rank_zero_info(f"ckpt_path=last: {last} does not exist yet, so this run starts with step 1")
            self.config_init[stage].ckpt_path = None
            return
        # Lightning looks for `last` only where checkpoints are written.
        self.config_init[stage].ckpt_path = str(path)
        if path.is_dir():  # of Lightning's ModelParallelStrategy
            return
        checkpoint = read_checkpoint(path, mmap=True, weights_only=self.config[stage].get("weights_only"))
        if stage == "fit" and "optimizer_states" not in checkpoint:
            raise UsageError(
                f"ckpt_path={path}: it holds the weights alone, without the optimizer's state to go on with"
            )
        if stage == "fit":
            refuse_half_a_step(checkpoint, path)
        done, steps = checkpoint["epoch"] + 1, self.trainer.max_epochs
        if stage == "fit" and steps is not None and 0 <= steps <= done:
            raise UsageError(
                f"trainer.max_epochs={steps}: {path} has done {done} steps already; give more to go on, such as "
                f"--trainer.max_epochs {2 * done}"
            )

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning reads the whole checkpoint here to look for options, and there are none."""

    def _run_subcommand(self, subcommand: str) -> None:
        trainer: Any = self.trainer
        checkpoint, folder = StepCheckpoint.find(trainer), Path(trainer.default_root_dir)
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            watched = re.match("Early stopping conditioned on|`ModelCheckpoint.monitor=", str(error))
            if watched:  # they name the metrics that there are
                raise UsageError(" ".join(str(error).split())) from error
            refused = disk.refusal(error, folder)
            if refused is None:
                raise
            saved = checkpoint.saved if checkpoint and subcommand == "fit" else "nothing else is lost"
            raise disk.DiskFailure(f"the disk refuses to write: {refused}. Make room or allow it; {saved}") from error
        except SystemExit:
            # Lightning ends a program that is interrupted outside of the training with 1.
            if self.trainer.state.status == TrainerStatus.INTERRUPTED:
                sys.exit(EXIT_CODE)
            raise
        if checkpoint is not None and checkpoint.interrupts.exit_code is not None:
            sys.exit(checkpoint.interrupts.exit_code)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The trainer, with the logger, callbacks and checkpoint files of this package."""
        config = self.config_init[self.subcommand].trainer
        given = config.logger if isinstance(config.logger, list) else [config.logger]
        if config.logger in (None, True):
            kwargs["logger"] = Board(config.default_root_dir)
        elif config.logger is not False and not any(is_in(config.default_root_dir, one) for one in given):
            # So that `grpo report` can read the run.
            kwargs["logger"] = [*given, RunCSVLogger(config.default_root_dir)]
        # A bar in a file is a mess of carriage returns.
        has_bar = sys.stdout.isatty() if config.enable_progress_bar is None else config.enable_progress_bar
        kwargs["enable_progress_bar"] = has_bar
        shown = StepProgressBar() if has_bar else StepLines()
        given = config.callbacks or []
        if other := next((callback for callback in given if isinstance(callback, ProgressBar)), None):
            raise UsageError(
                f"trainer.callbacks={type(other).__name__}: the run has a bar of its own, which shows sampling too; "
                "leave this one out"
            )
        if config.max_time is not None:
            kwargs["max_time"] = None
            given = [*given, time_limit(config.max_time)]
        kwargs["callbacks"] = [shown, FirstLook(), RunSummary(RECORDS), *given]
        if config.enable_checkpointing is False:
            internals.without_callback(self, "checkpoint")
        kwargs["plugins"] = [AtomicCheckpointIO(), *(config.plugins or [])]
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError) as error:
            raise usage_error(error) or UsageError(f"trainer: {refusal(error)}") from error


class PlanCLI(GRPOCLI):
    """`grpo plan`: makes everything in a configuration except the trainer, whose devices may not exist here."""

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Makes the parser, with the subcommand `plan`."""
        self.trainer_class = type("PlanningTrainer", (L.Trainer,), {"plan": grpo_lightning.Planner.plan})
        super().setup_parser(*args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommand, and the arguments that are made for it."""
        return {"plan": {"model", "datamodule"}}

    def before_instantiate_classes(self) -> None:
        """Refuses the same options, and leaves out what writes files."""
        super().before_instantiate_classes()
        # Some write when they are made.
        self.config.plan.trainer.logger = False
        self.config.plan.trainer.callbacks = None

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A planner with the trainer's settings, instead of a trainer."""
        return grpo_lightning.Planner(self.config_init.plan.trainer, self.config_init.plan.loop)

    def after_instantiate_classes(self) -> None:
        """Nothing: the weights may not exist here."""

    def _run_subcommand(self, subcommand: str) -> None:
        planner: Any = self.trainer
        planner.plan(**internals.arguments_of(self, subcommand))


def import_families() -> None:
    """Imports every file of the family folders, so that their classes are found."""
    for name in FAMILIES:
        folder = import_module(f"grpo_lightning.{name}")
        for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            import_module(module.name)


def try_optimizer(model: GRPOModule) -> None:
    """Raises UsageError where optimizer or schedule refuse their arguments: Lightning makes them after the weights."""
    key = "model.optimizer"
    try:
        optimizer = model.optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
        key = "model.lr_scheduler"
        if model.lr_scheduler is not None:
            model.lr_scheduler(optimizer)
    except ValueError as error:
        raise usage_error(error) or UsageError(f"{key}: {refusal(error)}") from error


def time_limit(limit: Any) -> Timer:
    """Ends the run after the step in which `limit` of this process's time has passed."""
    try:
        return StepTimer(limit)
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UsageError(f"trainer.max_time={limit}: give DD:HH:MM:SS, e.g. 00:08:00:00 for 8 hours") from error


def run(args: Sequence[str] | None = None) -> None:
    """Runs the command line; the user's mistakes end it with one message and exit code 2."""
    quieten()
    try:
        with LaunchedRanks():
            # torchrun then prints the error of the rank that failed first.
            (record(run_rank) if TorchElasticEnvironment.detect() else run_rank)(args)
    except (RewardFailure, FloatingPointError, disk.DiskFailure) as error:
        sys.exit(fail(error, code=1))
    except Exception as error:
        mistake = usage_error(error)
        report = import_module("grpo_lightning.plugins.planning.report")
        if mistake is None and report.is_out_of_memory(error):
            sys.exit(fail(MemoryError(report.out_of_memory_message(error)), code=1))
        if mistake is None:
            raise
        sys.exit(fail(mistake, code=2))


def run_rank(args: Sequence[str] | None = None) -> None:
    """The command line in this process alone."""
    given = sys.argv[1:] if args is None else args
    try:
        if found := early.mistake(given):
            raise UsageError(found)
        (PlanCLI if list(given[:1]) == ["plan"] else GRPOCLI)(args)
    except KeyboardInterrupt:  # before Lightning runs
        sys.exit(EXIT_CODE)


def quieten() -> None:
    """Silences messages of libraries that do not help here."""
    # Lightning 2.6 uses a call that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
    # The reference is meant to be in eval mode.
    warnings.filterwarnings("ignore", message="Found .* in eval mode at the start of training")
    # The loop logs numbers of all ranks.
    warnings.filterwarnings("ignore", message="It is recommended to use .self.log.*sync_dist")
    # An advertisement; devices, which a line of the loop names; an end that the summary tells; and that a step ends.
    noise = re.compile(
        r"litlogger|^(GPU|TPU|HPU) available:|^`Trainer.fit` stopped|batches will be used|^Trainer was sig"
    )
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: not noise.search(r.getMessage()))
    # Under SLURM, of its own requeueing, which that of the job script replaces.
    logging.getLogger("lightning.pytorch.trainer.connectors.signal_connector").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    keep_messages_off_bars()


def usage_error(error: BaseException | None) -> UsageError | None:
    """The user's mistake behind `error`: jsonargparse raises its own where an argument may also be None."""
    while error is not None:
        if isinstance(error, UsageError):
            return error
        error = error.__cause__
    return None


def fail(error: Exception, code: int) -> int:
    """Prints what went wrong on standard error; returns the exit code."""
    print(f"grpo: error: {error}", file=sys.stderr)
    return code
