"""The parser of the command line."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from grpo_lightning.command import parser_internals as internals
from grpo_lightning.command.overview import NEGATIVE, RENAMES, ask
from grpo_lightning.packaged import packaged
from grpo_lightning.types import UsageError


class Parser(LightningArgumentParser):
    """A parser that raises UsageError for mistakes. A plugin, if it is there, explains each in one line."""

    owner: type | None = None
    """The class whose arguments this parser reads; None for a command's options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        internals.take_negative_numbers(self, NEGATIVE)

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Adds the arguments of a class."""
        if nested_key is None:
            self.owner = theclass
        return super().add_class_arguments(theclass, nested_key, *args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *positional: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Reads options; an exception in a user's module is their mistake."""
        try:
            with internals.replacing():
                words = with_paths(sys.argv[1:] if args is None else args)
                return super().parse_args(ask(f"{RENAMES}:new_flags", words) or words, *positional, **kwargs)
        except Exception as error:
            if isinstance(error, UsageError | argparse.ArgumentError):
                raise
            if not (mistake := ask("plugins.console.mistakes.import_errors:refused_import", error)):
                raise
            raise mistake from error

    def instantiate(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Makes the classes; a logger without a folder logs into the folder of the run."""
        cfg = cfg.clone()
        commands = () if self.owner else ("fit", "validate", "test", "predict")
        for trainer in [cfg[name].trainer for name in commands if name in cfg]:
            loggers = trainer.logger
            for logger in loggers if isinstance(loggers, list) else [loggers]:
                options = logger.get("init_args") if isinstance(logger, Mapping | Namespace) else None
                if options is not None and options.get("save_dir", "") in (None, "."):
                    options["save_dir"] = str(trainer.default_root_dir)
        return super().instantiate(cfg, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises the mistake behind jsonargparse's message."""
        explained = ask("plugins.console.mistakes.option_errors:explain", self, message, ex)
        mistake = explained or argparse.ArgumentError(None, message)
        if self.exit_on_error:
            raise UsageError(str(mistake)) from ex
        raise mistake from ex


def with_paths(words: Sequence[str]) -> list[str]:
    """Returns the options, with the path of each configuration that is named as `grpo_lightning:NAME`."""
    flags = ("-c", "--config")
    words_with_paths = []
    for previous_word, word in zip(["", *words], words, strict=False):
        flag, is_joined, value = word.partition("=")
        if flag in flags and is_joined:
            word = f"{flag}={packaged(value)}"
        words_with_paths.append(packaged(word) if previous_word in flags else word)
    return words_with_paths
