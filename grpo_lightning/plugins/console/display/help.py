"""The help of the command line: its sections in the order of use, classes by their names, and defaults as in YAML."""

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from jsonargparse import DefaultHelpFormatter

from grpo_lightning.command.overview import SECTIONS
from grpo_lightning.command.parser import Parser
from grpo_lightning.command.parser_internals import options_of
from grpo_lightning.plugins.console.display import help_internals as internals

ORDER = ["model", "data", *SECTIONS, "", "trainer"]
"""The sections as `--help` shows them; the empty name stands for all others."""

HELP_BY_OPTION = {
    "seed_everything": "Seed of all random numbers, from 0 on.",
    "ckpt_path": "Checkpoint to go on with: a path, or `last` for the newest in the folder of the run.",
    "weights_only": "Read tensors and plain values alone. Set false only for a checkpoint that you trust.",
}
"""The help of options whose help in Lightning is about something else."""


class HelpFormatter(DefaultHelpFormatter):
    """Writes help without import paths where a name is enough, and with objects as in YAML."""

    def _expand_help(self, action: argparse.Action) -> str:
        return readable(super()._expand_help(action))


def readable(text: str) -> str:
    """Returns help text with classes by their names, types as in Python, and defaults of class options as in YAML."""
    # Classes and objects by their import paths.
    text = re.sub(r"<class '([^']*)'>", r"\1", text)
    text = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1", text)

    # Defaults as in YAML.
    class_default = r"\{'class_path': '([\w.]+)'(?:, 'init_args': (\{[^{}]*\}))?\}"
    text = re.sub(class_default, lambda match: f"{match[1]} {as_yaml(match[2] or '')}".rstrip(), text)
    text = re.sub(r"(?<=default: )\{.*?\}", lambda match: as_yaml(match[0]), text)

    # Import paths become names, but for paths in a docstring.
    text = re.sub(r"(?<![`.])\b(?:[a-z_]\w*\.)+(?=[A-Z]\w*)", "", text)

    # Unions, the inner ones first.
    union = re.compile(r"\b(Union|Optional)\[([^][]*(?:\[[^][]*\][^][]*)*)\]")
    while union.search(text):
        text = union.sub(alternatives, text)
    return text.replace(", known subclasses: ", "; there are: ")


def as_yaml(text: str) -> str:
    """Returns a Python dict of plain values as YAML writes it."""
    for python, yaml in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"(?<=: ){python}\b", yaml, text)
    return re.sub(r"'(\w+)': ", r"\1: ", text)


def alternatives(union: re.Match[str]) -> str:
    """Returns `Union[str, Path]` as `str | Path`, and `Optional[str]` as `str | null`."""
    members = re.split(r", (?![^[]*\])", union[2])
    return " | ".join([*members, "null"] if union[1] == "Optional" else members)


class HelpfulParser(Parser):
    """The parser of the command line, with readable help."""

    help_key: ClassVar[str] = ""
    """KEY of the last `--KEY.help` of the command line: the parser of a nested class knows the end of its key alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter} | kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *unused: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Reads options; notes the key of `--KEY.help`."""
        if self.owner is None:
            keys = [arg.partition(".help")[0] for arg in (sys.argv if args is None else args) if ".help" in arg]
            HelpfulParser.help_key = keys[-1] if keys else ""
        return super().parse_args(args, *unused, **kwargs)

    def dump(self, namespace: Any, *args: Any, **kwargs: Any) -> str:
        """Writes YAML without defaults that it cannot hold, such as a torch.device: the class has them anyway."""
        namespace = namespace.clone()
        parameters = inspect.signature(self.owner).parameters if self.owner else {}
        fields = getattr(self.owner, "__dataclass_fields__", {})
        for name, value in [*vars(namespace).items()]:
            has_import_path = "<" not in getattr(value, "__qualname__", "<")  # no lambda or inner function has
            is_plain = type(value).__module__ in ("builtins", "datetime", type(namespace).__module__)
            is_default = name in parameters and parameters[name].default is value
            is_default |= name in fields and type(value) is fields[name].default_factory
            if is_default and not (has_import_path if callable(value) else is_plain):
                del namespace[name]
        if "skip_none" in kwargs:  # Lightning 2.6 calls it so; jsonargparse would warn of it here
            kwargs["skip_unset"] = kwargs.pop("skip_none")
        return super().dump(namespace, *args, **kwargs)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Returns the help: short usage, then the sections in the order of use."""
        words = self.prog.replace("__main__.py", "grpo").replace("[options] ", "")
        self.usage = f"{words} [--config FILE ...] [--KEY VALUE ...]"

        # The parser of a nested class lacks the keys around its own.
        if nested := re.match(r"Help for (--\S+)\.help=", self.description or ""):
            internals.rename_flags(self, nested[1], self.help_key)
            self.description = str(self.description).replace(nested[1], self.help_key, 1)

        for option in options_of(self):
            option.help = HELP_BY_OPTION.get(option.dest, option.help)
        internals.retitle(self, "ckpt_path", "A checkpoint")
        internals.retitle(self, "trainer.accelerator", "Lightning's trainer: devices, strategy, precision, logger")

        # The group of the command's arguments, such as ckpt_path, stays first.
        command = self.prog.split()[-1]
        sections = [item for item in (self.groups or {}).items() if item[0] != command]
        order = {name: index for index, name in enumerate(ORDER)}
        sections.sort(key=lambda item: order.get(item[0].partition(".")[0], order[""]))
        internals.show_last(self, [group for _, group in sections])
        return super().format_help(*args, **kwargs)
