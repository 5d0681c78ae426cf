"""The parser of the command line: its help in the order of use, and its errors as one line."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from grpo_lightning.command import internals
from grpo_lightning.command.early import NEGATIVE
from grpo_lightning.command.imports import import_mistake
from grpo_lightning.command.mistakes import OptionError, explain
from grpo_lightning.types import UsageError

SECTIONS = ("model", "data", "loop", "checkpoint")
"""The sections that `--help` shows first. Others follow; Lightning's trainer is last."""


OWN_WORDS = {
    "seed_everything": "Seed of all random numbers, from 0 on.",
    "ckpt_path": "Checkpoint to go on with: a path, or `last` for the newest in the folder of the run.",
    "weights_only": "Read tensors and plain values alone. Set false only for a checkpoint that you trust.",
}
"""The help of options whose own is about something else."""


class HelpFormatter(DefaultHelpFormatter):
    """Help without import paths where a name is enough, and without Python's own way to write objects."""

    def _expand_help(self, action: argparse.Action) -> str:
        return readable(super()._expand_help(action))


def readable(text: str) -> str:
    """Help text with classes by their names, types as in Python, and the defaults of class options as in YAML."""
    text = re.sub(r"<class '([^']*)'>", r"\1", text)
    text = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1", text)
    text = re.sub(r"\{'class_path': '([\w.]+)'(?:, 'init_args': (\{[^{}]*\}))?\}", given_class, text)
    text = re.sub(r"(?<=default: )\{.*?\}", lambda found: as_yaml(found[0]), text)
    text = re.sub(r"(?<![`.])\b(?:[a-z_]\w*\.)+(?=[A-Z]\w*)", "", text)  # bar where a docstring shows a path
    while (shorter := re.sub(r"\b(Union|Optional)\[([^][]*(?:\[[^][]*\][^][]*)*)\]", alternatives, text)) != text:
        text = shorter
    return text.replace(", known subclasses: ", "; there are: ")


def given_class(found: re.Match[str]) -> str:
    """A class with its arguments, as `Name` or `Name {lr: 1e-06}`."""
    return f"{found[1]} {as_yaml(found[2] or '')}".rstrip()


def as_yaml(text: str) -> str:
    """A Python dict of plain values as YAML writes it."""
    for python, yaml in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"(?<=: ){python}\b", yaml, text)
    return re.sub(r"'(\w+)': ", r"\1: ", text)


def alternatives(found: re.Match[str]) -> str:
    """`Union[str, Path]` as `str | Path`, and `Optional[str]` as `str | null`."""
    parts = re.split(r", (?![^[]*\])", found[2])
    return " | ".join([*parts, "null"] if found[1] == "Optional" else parts)


class Parser(LightningArgumentParser):
    """A parser that explains each mistake in one line, and shows what a user needs first.

    jsonargparse makes one more for each class that is named in the options.
    """

    owner: type | None = None
    """The class whose arguments this parser reads; None for a command's options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)
        internals.take_negative_numbers(self, NEGATIVE)

    asked: ClassVar[str] = ""
    """The last `--KEY.help` of the command line: the parser of a class inside of another knows no whole keys."""

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Adds the arguments of a class."""
        if nested_key is None:
            self.owner = theclass
        return super().add_class_arguments(theclass, nested_key, *args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Reads options; an exception of a module of the user's is their mistake."""
        if self.owner is None:
            given = [arg.partition(".help")[0] for arg in (sys.argv if args is None else args) if ".help" in arg]
            Parser.asked = given[-1] if given else ""
        try:
            with internals.replacing():
                return super().parse_args(args, *others, **kwargs)
        except (UsageError, OptionError):
            raise
        except Exception as error:
            path = internals.class_being_imported(error)
            if path is None:
                raise
            raise UsageError(f"{path}: {import_mistake(path, [])}") from error

    def instantiate(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Makes the classes; a logger without a folder of its own logs into that of the run."""
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
        mistake = explain(self, message, ex)
        if self.exit_on_error:
            raise UsageError(str(mistake)) from ex
        raise mistake from ex

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help: short usage, then the sections in the order of use."""
        self.usage = usage_of(self.prog)
        if inner := re.match(r"Help for (--\S+)\.help=", self.description or ""):
            internals.rename_flags(self, inner[1], self.asked)
            self.description = str(self.description).replace(inner[1], self.asked, 1)
        for option in internals.options_of(self):
            option.help = OWN_WORDS.get(option.dest, option.help)
        internals.retitle(self, "ckpt_path", "A checkpoint")
        internals.retitle(self, "trainer.accelerator", "Lightning's trainer: devices, strategy, precision, logger")
        own = self.prog.split()[-1]  # the group of the command's own arguments, such as ckpt_path, stays first
        sections = [item for item in (self.groups or {}).items() if item[0] != own]
        internals.show_last(self, [group for _, group in sorted(sections, key=by_section)])
        return super().format_help(*args, **kwargs)

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: an error message says what to do."""


def by_section(item: tuple[str, Any]) -> int:
    """The position of a group of options in the help; groups of one section keep their order."""
    section = item[0].partition(".")[0]
    return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS) + (section == "trainer")


def usage_of(prog: str) -> str:
    """One line, whatever the number of options."""
    words = prog.replace("__main__.py", "grpo").replace("[options] ", "")
    return f"{words} [--config FILE ...] [--KEY VALUE ...]"
