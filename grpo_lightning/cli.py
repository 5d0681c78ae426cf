"""The command line: `grpo fit|validate|test|predict|plan`; `inspect`, `report`, `export` and `grader` are apart."""

import pkgutil
import random
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerStatus
from torch.distributed.elastic.multiprocessing.errors import record

from grpo_lightning import disk
from grpo_lightning.command.overview import ALWAYS, COMMANDS, DEFAULTS, SECTIONS, SEEDED, ask, optional
from grpo_lightning.command.parser import Parser
from grpo_lightning.rewards.scorer import RewardFailure
from grpo_lightning.training import internals
from grpo_lightning.training.board import RunCSVLogger
from grpo_lightning.training.callbacks.checkpoint import (
    CODES,
    EXIT_CODE,
    StepCheckpoint,
    check_overwriting,
    checkpoint_to_read,
)
from grpo_lightning.training.checkpoint_files import AtomicCheckpointIO
from grpo_lightning.training.checks import check_half, check_options, check_run
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import UsageError

refusal = optional("plugins.console.mistakes.import_errors:refusal") or str
refused_argument = optional("plugins.console.mistakes.option_errors:refused_argument") or UsageError
"""These turn an exception into its message, and into the user's mistake behind it."""

DISTRICTS = ("rewards", "methods", "sources", "data", "engines", "compute")
FAMILIES = ("maths", "tasks", "rewards", "policy", "engines", *(f"plugins.{name}" for name in DISTRICTS))
"""The folders of the families. A class in any of their files is known by its short name in YAML."""


class GRPOCLI(LightningCLI):
    """LightningCLI with the loop, checkpoints, logging and messages of grpo_lightning."""

    def __init__(self, args: Sequence[str] | None = None) -> None:
        super().__init__(
            GRPOModule,
            optional("PromptDataModule") or TaskData,
            save_config_callback=optional("SaveConfig") or SaveConfigCallback,
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
            parser_class=optional("plugins.console.display.help:HelpfulParser") or Parser,
            parser_kwargs={name: {"description": COMMANDS[name].summary} for name in self.subcommands()},
            args=list(args) if args is not None else None,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the callbacks, the defaults and the links between seeds."""
        import_families()
        for key, name in SECTIONS.items():
            if section := optional(name):
                parser.add_lightning_class_args(section, key)
        # A default whose plugin is not installed falls back to GRPOModule's own.
        available = {key: value for key, value in DEFAULTS.items() if optional(value.get("class_path", "Guard"))}
        parser.set_defaults(available)
        for key in SEEDED:
            parser.link_arguments("seed_everything", key, compute_fn=int)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Reads the options, and refuses a seed from which no other seeds can follow."""
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
        check_options(trainer)
        check_half(trainer.precision, trainer.accelerator)
        ask("plugins.console.display.saved_config:check_readable", self.parser, self.config)

    def instantiate_classes(self) -> None:
        """Makes the classes of the configuration; a refusal by one of them is the user's mistake."""
        try:
            super().instantiate_classes()
        except (ValueError, ModuleNotFoundError, MisconfigurationException) as error:
            raise usage_error(error) or refused_argument(error) from error

    def after_instantiate_classes(self) -> None:
        """Reads data and weights."""
        # Mistakes in the data, the folder of the model or that of the run show before anything is written.
        stage = str(self.subcommand)
        trainer = self.trainer
        model = self.model
        options = self.config[stage]
        path = checkpoint_to_read(options.ckpt_path, stage, trainer, options.get("weights_only"))
        self.config_init[stage].ckpt_path = path
        if stage == "fit":
            if StepCheckpoint.find(trainer) is not None:
                check_overwriting(trainer, path)
            check_run(model, trainer, refusal)
        model.policy.check()
        model.read_questions(self.datamodule, stage, trainer)
        # Lightning starts its loggers, which write, before it asks for the weights.
        with trainer.strategy.tensor_init_context(), trainer.strategy.precision_plugin.module_init_context():
            model.load(trainer.strategy.precision_plugin)

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning reads the whole checkpoint here to look for options, and there are none."""

    def _run_subcommand(self, subcommand: str) -> None:
        checkpoint = StepCheckpoint.find(self.trainer) if subcommand == "fit" else None
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            if re.match("Early stopping conditioned on|`ModelCheckpoint.monitor=", str(error)):
                raise UsageError(" ".join(str(error).split())) from error  # it names the metrics that there are
            folder = Path(self.trainer.default_root_dir)
            refused = ask("plugins.console.mistakes.disk_errors:refusal", error, folder)
            if refused is None:
                raise
            saved = checkpoint.saved if checkpoint else "nothing else is lost"
            raise disk.DiskFailure(f"the disk refuses to write: {refused}. Make room or allow it; {saved}") from error
        except SystemExit:
            # Lightning ends a program that is interrupted outside of the training with 1.
            if self.trainer.state.status == TrainerStatus.INTERRUPTED:
                sys.exit(EXIT_CODE)
            raise
        if checkpoint is not None and (code := CODES.get(checkpoint.stopped_by)):
            sys.exit(code)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Makes the trainer, with the logger, callbacks and checkpoint files of this package."""
        config = self.config_init[self.subcommand].trainer
        loggers = config.logger if isinstance(config.logger, list) else [config.logger]
        folders = [Path(logger.log_dir) for logger in loggers if isinstance(logger, TensorBoardLogger | CSVLogger)]
        if config.logger in (None, True):
            board = optional("Board") or partial(TensorBoardLogger, name="", version="")
            kwargs["logger"] = board(config.default_root_dir)
        elif config.logger is not False and Path(config.default_root_dir) not in folders:
            # So that `grpo report` can read the run.
            kwargs["logger"] = [*loggers, RunCSVLogger(config.default_root_dir)]
        # A bar in a file is a mess of carriage returns.
        has_bar = sys.stdout.isatty() if config.enable_progress_bar is None else config.enable_progress_bar
        kwargs["enable_progress_bar"] = has_bar and self.subcommand != "fit"
        callbacks = config.callbacks or []
        for bar in [callback for callback in callbacks if isinstance(callback, ProgressBar)]:
            raise UsageError(
                f"trainer.callbacks={type(bar).__name__}: the run has a bar of its own, which shows sampling too; "
                "leave this one out"
            )
        lines = [kind(bar=has_bar)] if (kind := optional("StepLines")) else []
        kwargs["callbacks"] = [*lines, *(kind() for name in ALWAYS if (kind := optional(name))), *callbacks]
        options = self.config_init[self.subcommand]
        table = optional("plugins.data.benchmarks.benchmark_table:EvaluationTable")
        if table is not None and options.get("verbose") and self.subcommand in ("validate", "test"):
            # Lightning's table has no intervals.
            options.verbose = False
            kwargs["callbacks"].append(table())
        if config.max_time is not None and (timer := optional("StepTimer")):
            kwargs["max_time"] = None
            kwargs["callbacks"].append(timer(config.max_time))
        if config.enable_checkpointing is False:
            internals.without_callback(self, "checkpoint")
        plugins = config.plugins or []
        kwargs["plugins"] = [AtomicCheckpointIO(), *(plugins if isinstance(plugins, list) else [plugins])]
        try:
            return super().instantiate_trainer(**kwargs)
        # SLURM's variables, a strategy or accelerator that is not installed, options that exclude one another.
        except (MisconfigurationException, ValueError, RuntimeError, TypeError, ImportError) as error:
            raise usage_error(error) or UsageError(f"trainer: {refusal(error)}") from error


def import_families() -> None:
    """Imports every file of the family folders, so that their classes are found."""
    for name in FAMILIES:
        for module in pkgutil.walk_packages(optional(f"{name}:__path__") or [], f"grpo_lightning.{name}."):
            import_module(module.name)


def run(args: Sequence[str] | None = None) -> None:
    """Runs the command line; the user's mistakes end it with one message and exit code 2."""
    ask("plugins.console.display.quiet:quieten")
    try:
        with (optional("plugins.console.cluster.launched_ranks:LaunchedRanks") or nullcontext)():
            # torchrun then prints the error of the rank that failed first.
            (record(run_rank) if TorchElasticEnvironment.detect() else run_rank)(args)
    except Exception as error:
        mistake = usage_error(error)
        if isinstance(error, RewardFailure | FloatingPointError | disk.DiskFailure):
            message = mistake or error
        else:
            message = mistake or ask("plugins.compute.planning.plan_report:out_of_memory_message", error)
        if not message:
            raise
        print(f"grpo: error: {message}", file=sys.stderr)
        sys.exit(2 if mistake else 1)


def run_rank(args: Sequence[str] | None = None) -> None:
    """Runs the command line in this process alone."""
    words = sys.argv[1:] if args is None else args
    try:
        command_line(next(iter(words), ""))(args)
    except KeyboardInterrupt:  # before Lightning runs
        sys.exit(EXIT_CODE)


def command_line(command: str) -> type[GRPOCLI]:
    """Returns the class that reads the options of a command."""
    planning = optional("plugins.compute.planning.plan_report:Planning") if command == "plan" else None
    if planning is None:
        return GRPOCLI

    class PlanCLI(planning, GRPOCLI):  # type: ignore[misc, valid-type]
        """The command line of `grpo plan`."""

    return PlanCLI


def usage_error(error: BaseException | None) -> UsageError | None:
    """Returns the user's mistake behind `error`: jsonargparse raises its own where an argument may also be None."""
    while error is not None:
        if isinstance(error, UsageError):
            return error
        error = error.__cause__
    return None
