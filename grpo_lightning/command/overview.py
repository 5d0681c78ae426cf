"""The commands of `grpo`, the sections of their options, and defaults. This module does not import torch."""

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

from grpo_lightning.types import UsageError


class Command(NamedTuple):
    """A command of `grpo`."""

    summary: str
    """What it does, in a sentence."""
    module: str = "grpo_lightning.cli"
    """The module with its `main(args)`, which returns the exit code.

    `grpo_lightning.cli` reads a configuration and runs it. Another `main` may change `sys.argv` and return None. Then
    `grpo_lightning.cli` runs the changed command.
    """


PLUGINS = "grpo_lightning.plugins"

COMMANDS: dict[str, Command] = {
    "init": Command("Writes a project to begin with, or an example.", f"{PLUGINS}.console.start.init"),
    "from-trl": Command("Turns a run of TRL into a configuration.", f"{PLUGINS}.console.porting.from_trl"),
    "fit": Command("Trains a policy by GRPO."),
    "validate": Command("Measures a policy, or a checkpoint, on the validation questions."),
    "inspect": Command(
        "Writes a page that shows what a run did to each token.", f"{PLUGINS}.looking.inspector.inspector_page"
    ),
    "report": Command(
        "Compares runs on one page: curves, tables, what differs.", f"{PLUGINS}.looking.report.report_command"
    ),
    "sweep": Command("Makes the runs of an experiment, and compares them.", f"{PLUGINS}.console.sweep.sweep_command"),
    "export": Command(
        "Writes a run's policy as a model for transformers and vLLM.", f"{PLUGINS}.looking.export.export_command"
    ),
    "evaluate": Command("Measures a model on benchmarks, without a run.", f"{PLUGINS}.data.benchmarks.evaluate"),
    "plan": Command("Prints what memory `grpo fit` would take with the same options, without weights or devices."),
    "predict": Command("Writes completions of your prompts, with their scores, to a file."),
    "test": Command("Measures a policy, or a checkpoint, on the test questions."),
    "judge": Command("Measures how well a judge agrees with the verifier.", f"{PLUGINS}.rewards.judge.judge_command"),
    "env": Command(
        "Prints the versions of everything, for a bug report, or what made a run.", f"{PLUGINS}.console.start.env"
    ),
}
"""In the order in which they are used."""

SECTIONS = {
    "loop": "GRPOLoop",
    "checkpoint": "StepCheckpoint",
    "completions": "SampledCompletions",
    "inspect": "Inspector",
    "predictions": "PredictionWriter",
    "memory": "MemoryReport",
}
"""Callbacks with options: the public name of the class, by the section of its options beside `model` and `data`."""

ALWAYS = ("FirstLook", "RunSummary", "ValidationValues", "Provenance")
"""Callbacks without options, by their public names. Every run has them."""

DEFAULTS: dict[str, Any] = {
    "model.engine": {"class_path": "NativeEngine"},
    "model.advantage": {"class_path": "GroupStd"},
    "model.old_policy": {"class_path": "RecordedLogp"},
    "model.sampling": {},
    "model.policy.compute": {"class_path": "Fast"},
    "model.guard": {},
    "model.validation": {},
    "loop.stop": {"class_path": "FixedPasses"},
    "loop.source": {"class_path": "Synchronous"},
    "data.order": {"class_path": "Shuffled"},
    "model.objective": {
        "surrogate": {"class_path": "Clipped"},
        "kl": {"class_path": "K3"},
        "weighting": {"class_path": "SequenceMean"},
        "correction": {"class_path": "NoCorrection"},
        "entropy": {"class_path": "NoEntropy"},
    },
}
"""Defaults of the command line, spelled out for `--help` and `--print_config`.

They are the defaults of GRPOModule, except for the faster engine and compute.
"""


RENAMES = "plugins.console.mistakes.renames"


def optional(path: str) -> Any:
    """Returns the object with a public name, or with the path `module:name`; None if its plugin's folder is missing.

    The core reaches plugins only by this function.
    """
    module, _, name = path.rpartition(":")
    try:
        return getattr(import_module(f"grpo_lightning.{module}" if module else "grpo_lightning"), name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("grpo_lightning.plugins"):
            raise
        return None


def ask(path: str, *args: Any) -> Any:
    """Calls a plugin's function, and returns its result; returns None if the plugin's folder is missing."""
    function = optional(path)
    return function(*args) if function else None


SEEDED = ("loop.seed", "data.seed")
"""The seeds that follow from `seed_everything`."""

NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
"""Matches a negative number: an argument that begins with a dash, but is no flag."""


def overview() -> str:
    """Returns the help of `grpo` without a command."""
    commands = "\n".join(f"  {name:<8}  {command.summary}" for name, command in COMMANDS.items())
    return f"""usage: grpo COMMAND [--config FILE ...] [--KEY VALUE ...]

GRPO (DeepSeekMath, Algorithm 1) and its relatives. The commands, in the order in which they are used:
{commands}

`grpo COMMAND --help` lists the options. `grpo fit --model.advantage.help GroupStd` explains one class.
`grpo fit --config FILE --print_config` prints every option with its value.

An example: a project, trained and looked at.
  grpo init sums
  cd sums
  grpo fit --config run.yaml
  grpo inspect runs/first"""


def answer(args: Sequence[str]) -> int | None:
    """Runs a command that needs no torch, and returns the exit code; None if `grpo_lightning.cli` must run it."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        print(import_module("grpo_lightning").__version__)
        return 0
    if args[0].startswith("-"):
        return None
    if args[0] not in COMMANDS:
        hint = "".join(f" Did you mean {name}?" for name in get_close_matches(args[0], COMMANDS, 1))
        print(
            f"grpo: error: {args[0]}: there is no such command.{hint} There are {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    module = COMMANDS[args[0]].module
    if module == "grpo_lightning.cli":
        return None
    try:
        return import_module(module).main(args[1:])
    except UsageError as error:
        print(f"grpo: error: {error}", file=sys.stderr)
        return 2
