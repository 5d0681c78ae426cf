"""`grpo from-trl`: prints the configuration of a run that is set up for TRL."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.plugins.console.porting.trl_rules import RULES, TABLE, Setting, translate
from grpo_lightning.plugins.console.porting.trl_script import TrlScript
from grpo_lightning.tasks.readers import READERS
from grpo_lightning.types import UsageError

DESCRIPTION = """Prints the configuration of a GRPO run of TRL as a configuration here, with the arithmetic beside it.

It reads a Python script, without running it, the YAML file of `trl grpo`, or a GRPOConfig in JSON. Defaults of TRL that
differ are written out, and what has no counterpart is said.

  grpo from-trl train.py --out run.yaml
  grpo fit --config run.yaml"""


def main(args: Sequence[str] | None = None) -> int:
    """Prints or writes the configuration; returns the exit code."""
    parser = argparse.ArgumentParser(
        "grpo from-trl", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", metavar="FILE", help="script (.py), options of `trl grpo` (.yaml) or GRPOConfig (.json)"
    )
    parser.add_argument("--out", type=Path, help="file to write; by default the configuration is printed")
    parser.add_argument("--world", type=int, help="number of processes that TRL runs on; by default 1")
    parser.add_argument("--questions", type=int, help="number of training questions, for num_train_epochs")
    arguments = parser.parse_args(args)
    if arguments.out and arguments.out.exists():
        raise UsageError(f"--out {arguments.out}: there is such a file already; give another name, or remove it")
    path = Path(arguments.file)
    options, script_remarks = options_of(path)
    num_rows = look_at(options)
    settings, remarks = translate(options, arguments.questions or num_rows, arguments.world)
    head = [f"# {path}, as TRL {TABLE['version']} runs it; written by `grpo from-trl`. What is left to do:"]
    head += [f"# {number}. {' '.join(text.split())}" for number, text in enumerate([*script_remarks, *remarks], 1)]
    text = "\n".join([*head, *yaml_lines(settings), ""])
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
        text = "\n".join([f"{arguments.out}: written. It begins:", *head, ""])
    print(text, end="")
    return 0


def options_of(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the options in a file by TRL's names, and remarks about what could not be read."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            script = TrlScript(path, text)
            return script.options(), script.remarks
        # JSON is YAML, which reads 1e-6 as text.
        options = yaml.safe_load(re.sub(r"(: *-?\d+)(e[-+]\d+)", r"\1.0\2", text))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: it cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict) or not RULES.keys() & options.keys():
        raise UsageError(
            f"{path}: there is no option of GRPOConfig in it: give a script, a YAML or a JSON file for TRL"
        )
    return options, []


def look_at(options: dict[str, Any]) -> int:
    """Returns the number of questions in the training file, and notes whether they are lists of messages; 0 without."""
    source = options.get("train_dataset") or {}
    files = source.get("data_files")
    path = Path(str(files.get(source.get("split")) if isinstance(files, dict) else files))
    is_table = path.is_file() and path.suffix in READERS
    rows = [row for _, row in READERS[path.suffix](path)] if is_table else []
    if rows:
        options["conversational"] = isinstance(rows[0].get("prompt"), list)
    return len(rows)


def yaml_lines(settings: Mapping[str, Setting]) -> Iterator[str]:
    """Yields the lines of the settings in YAML, each with its comment."""
    previous: list[str] = []
    for key, setting in settings.items():
        parts = key.split(".")
        for depth in range(1, len(parts)):
            if parts[:depth] != previous[:depth]:
                yield f"{'  ' * (depth - 1)}{parts[depth - 1]}:"
        previous = parts
        value = yaml.safe_dump(setting.value, default_flow_style=True, width=1e9, sort_keys=False).splitlines()[0]
        comment = " ".join(setting.comment.split()).removesuffix(":")
        yield f"{'  ' * (len(parts) - 1)}{parts[-1]}: {value}  # {comment}"
