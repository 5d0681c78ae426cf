"""The configuration of a run: in its folder, with the configurations of earlier starts, and in its loggers."""

import inspect
import re
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import SaveConfigCallback

import grpo_lightning
from grpo_lightning import disk
from grpo_lightning.command.parser_internals import subparsers_of
from grpo_lightning.plugins.looking.run_files.run_configs import UNTIL, differing, earlier_files, flat, without_secrets
from grpo_lightning.training.evaluation import grader_class
from grpo_lightning.types import UsageError

FOREIGN = r"class_path='(?!grpo_lightning\.|torch\.optim\.)"
"""A class of another library, or of the user's, in the text of a configuration."""

UNREADABLE = "Unable to serialize instance "
"""The beginning of the text that jsonargparse writes in place of an object."""


class SaveConfig(SaveConfigCallback):
    """Keeps the newest configuration as `config.yaml`; earlier ones move to `config.1.yaml`, `config.2.yaml` ...

    The first line of an earlier configuration says until which step it was in force. Every logger gets the options too.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Names the task's grader, which the options leave out, as other files of the run do.

        Nothing is written: the model may fail to load, and `validate` must leave the config.yaml of a run alone.
        """
        task_grader = trainer.datamodule.task.grader  # type: ignore[attr-defined]
        if self.config.model.validation.grader is None and task_grader is not None:
            kind = grader_class(task_grader)
            module = "grpo_lightning" if kind.__name__ in grpo_lightning.__all__ else kind.__module__
            parameters = inspect.signature(kind).parameters.values()
            defaults = {
                parameter.name: parameter.default
                for parameter in parameters
                if parameter.default is not parameter.empty
            }
            grader = Namespace(class_path=f"{module}.{kind.__name__}", init_args=Namespace(**defaults))
            self.config["model.validation.grader"] = grader

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file, on rank 0, and shows the options in every logger."""
        if not trainer.is_global_zero:
            return
        config = self.config.clone()
        # The file describes the run, not how it was started.
        config["ckpt_path"] = None
        text = self.parser.dump(config, skip_unset=False)
        folder = Path(trainer.default_root_dir)
        self._keep(folder / "config.yaml", text, trainer.current_epoch)
        for logger in trainer.loggers:
            logger.log_hyperparams(without_secrets(yaml.safe_load(text)))

    def _keep(self, path: Path, text: str, steps: int) -> None:
        """Writes `text` to `path`; moves another configuration there to a numbered file.

        Args:
            path: The file `config.yaml`.
            text: The new configuration.
            steps: Steps that the run has done.
        """
        # A run that continues from an earlier checkpoint shortens the time of configurations that came later.
        for until, file in earlier_files(path.parent):
            if until > steps:
                _, _, yaml_text = file.read_text(encoding="utf-8").partition("\n")
                disk.write_whole(file, f"{UNTIL}{steps}\n{yaml_text}")

        if path.exists():
            earlier_text = path.read_text(encoding="utf-8")
            if not differences(earlier_text, text):
                return
            files = (path.with_name(f"config.{number}.yaml") for number in count(1))
            file = next(file for file in files if not file.exists())
            disk.write_whole(file, f"{UNTIL}{steps}\n{earlier_text}")
        disk.write_whole(path, text)


def check_readable(parser: Any, config: Namespace) -> None:
    """Raises UsageError for options that config.yaml could not give back, so that no run could go on with it.

    Args:
        parser: The parser of the whole command line.
        config: The options of a subcommand, with its name.
    """
    parser = subparsers_of(parser)[config.subcommand]
    config = config[config.subcommand]
    # Classes of this package and the optimizers are read back, as tests show, and the check takes a while.
    if not re.search(FOREIGN, str(config)):
        return
    subject = "config.yaml, with which a run goes on,"

    # Can the options be written?
    try:
        with warnings.catch_warnings(action="ignore"):  # jsonargparse warns of objects that the loop below refuses
            text = parser.dump(config, skip_unset=False)
    except (ValueError, TypeError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UsageError(f"{subject} cannot hold {cause.args[-1]}. Give text or numbers") from error
    for key, value in flat(yaml.safe_load(text)).items():
        if UNREADABLE in str(value):
            raise UsageError(
                f"{key}: {subject} cannot hold {str(value).removeprefix(UNREADABLE)}. Give a function or class of a "
                "module, by its import path"
            )

    # Are they read back as they were?
    try:
        text_of_read = parser.dump(parser.parse_string(text), skip_unset=False)
    except UsageError as error:
        raise UsageError(f"{subject} could not be read again: {error}") from error
    if changes := differences(text, text_of_read):
        raise UsageError(f"{subject} would be read as other options: {', '.join(changes)}. Give other values for them")


def differences(earlier: str, later: str) -> list[str]:
    """Returns `loop.mu 1 -> 2` for every option that differs between two configurations in YAML."""
    try:
        configs = [yaml.safe_load(text) or {} for text in (earlier, later)]
    except yaml.YAMLError:  # edited by hand
        return ["config.yaml, which was no YAML"]
    changed_keys = differing([flat(config) | {"ckpt_path": None} for config in configs])
    old_values, new_values = (flat(without_secrets(config)) for config in configs)
    return [f"{key} {old_values.get(key, 'not set')} -> {new_values.get(key, 'not set')}" for key in changed_keys]
