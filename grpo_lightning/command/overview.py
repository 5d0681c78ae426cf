"""The commands of `grpo`: their list, and which program each name stands for. It imports no torch."""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """One command of `grpo`."""

    summary: str
    """What it does, in one line."""
    module: str = "grpo_lightning.cli"
    """Where its `main(args) -> int` is; `grpo_lightning.cli` reads a configuration and runs it."""


COMMANDS: dict[str, Command] = {
    "fit": Command("Trains a policy by GRPO."),
    "validate": Command("Measures a policy, or a checkpoint, on the validation questions."),
    "test": Command("Measures a policy, or a checkpoint, on the test questions."),
    "predict": Command("Writes completions of your prompts, with their scores, to a file."),
    "inspect": Command(
        "Writes a page that shows what a run did to each token.", "grpo_lightning.plugins.inspect.command"
    ),
    "report": Command(
        "Compares runs on one page: curves, a table, what differs.", "grpo_lightning.plugins.inspect.report"
    ),
    "export": Command(
        "Writes a run's policy as a model for transformers and vLLM.", "grpo_lightning.plugins.inspect.export_command"
    ),
    "plan": Command("Prints what memory a run would take, without weights or devices. It takes the options of fit."),
}

USAGE = "usage: grpo COMMAND [--config FILE ...] [--KEY VALUE ...]"


def overview() -> str:
    """The help of `grpo` itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            USAGE,
            "",
            "GRPO (DeepSeekMath, Algorithm 1) and its relatives. The commands:",
            *lines,
            "",
            "`grpo COMMAND --help` lists the options. `grpo fit --model.advantage.help GroupStd` explains one class.",
            "`grpo fit --config FILE --print_config` prints every option with its value.",
        ]
    )


def answer(args: Sequence[str]) -> int | None:
    """Answers what needs no torch: prints, and returns the exit code; None leaves it to grpo_lightning.cli.

    Args:
        args: What follows `grpo`.
    """
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        print(import_module("grpo_lightning").__version__)
        return 0
    if args[0].startswith("-"):
        return None
    if args[0] not in COMMANDS:
        close = get_close_matches(args[0], COMMANDS, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        names = ", ".join(COMMANDS)
        print(f"grpo: error: {args[0]}: there is no such command.{hint} There are {names}", file=sys.stderr)
        return 2
    module = COMMANDS[args[0]].module
    if module != "grpo_lightning.cli":
        return int(import_module(module).main(args[1:]))
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) > 1:
        return None  # the command line has one rank speak for all
    found = import_module("grpo_lightning.command.early").mistake(args)
    if found is None:
        return None
    print(f"grpo: error: {found}", file=sys.stderr)
    return 2
