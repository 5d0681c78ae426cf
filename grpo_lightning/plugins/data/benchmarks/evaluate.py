"""`grpo evaluate`: benchmarks on any model, without a run.

    grpo evaluate Qwen/Qwen2.5-0.5B-Instruct --benchmarks gsm8k math500
    grpo evaluate exported --benchmarks mine.yaml --samples 4 --limit 100 --trainer.precision bf16-mixed

It is `grpo validate` with the benchmarks as `data.validations`, and takes its options too.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from grpo_lightning.packaged import CONFIGS
from grpo_lightning.types import UsageError, at_least

BENCHMARKS = CONFIGS / "benchmarks"
"""The folder with configurations of benchmarks, each under its name."""

UNUSED = {"--data.task": "Arithmetic", "--model.rewards": "FormatReward", "--data.val_limit": "0"}
"""Options that a run must have, and an evaluation does not use."""

FIXED_WEIGHTS = {"--model.engine": "NativeEngine", "--model.engine.packed": "true"}
"""Weights in a form that decodes faster on a CPU, made once. They come first: configurations and options override."""

QUIET = {"--verbose": "false", "--trainer.logger": "false", "--trainer.enable_checkpointing": "false"}
"""No output but the table."""


def main(args: Sequence[str] | None = None) -> None:
    """Replaces the options of `grpo evaluate` with options of `grpo validate`."""
    parser = argparse.ArgumentParser(
        "grpo evaluate",
        description="Measures a model on benchmarks: avg@k with its 95 %% interval over questions, pass@k, maj@k, and "
        "the greedy answer. Other options are those of `grpo validate`, such as --trainer.precision bf16-mixed.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder that transformers reads, such as an export, or a name of the Hub")
    add("--benchmarks", nargs="+", required=True, metavar="NAME", help=f"configurations, by path or name: {known()}")
    add("--samples", type=int, help="k of avg@k, pass@k and maj@k, for all of them")
    add("--limit", type=int, help="ask the first questions of each")
    add("-o", "--out", help="file for the numbers, as JSON")
    parsed, validate_args = parser.parse_known_args(args)
    at_least("--samples", parsed.samples, 1)
    at_least("--limit", parsed.limit, 1)
    paths = [path_of(name) for name in parsed.benchmarks]
    names = [name for path in paths for name in names_in(path)]

    options = {"--model.policy.path": parsed.model} | UNUSED | QUIET
    options["--trainer.callbacks"] = f"{__package__}.benchmark_table.EvaluationTable"
    if parsed.out:
        options["--trainer.callbacks.out"] = parsed.out
    if not any(arg.startswith("--data.chat") for arg in validate_args):
        options["--data.chat"] = str(has_chat_template(parsed.model)).lower()
    for key in ("samples", "limit"):
        if (value := getattr(parsed, key)) is not None:
            options |= {f"--data.validations.{name}.{key}": str(value) for name in names}

    # Later options override earlier ones.
    configs = [word for path in paths for word in ("--config", str(path))]
    sys.argv[1:] = ["validate", *words(FIXED_WEIGHTS), *configs, *words(options), *validate_args]


def words(options: Mapping[str, str]) -> list[str]:
    """Returns options as words of a command line."""
    return [word for option in options.items() for word in option]


def has_chat_template(model: str) -> bool:
    """Returns True if the model's tokenizer has one; False for an unreadable model, which `validate` refuses."""
    from transformers import AutoTokenizer  # it takes seconds, which --help need not wait for

    try:
        return bool(AutoTokenizer.from_pretrained(model).chat_template)
    except (OSError, ValueError):
        return False


def known() -> str:
    """Returns the names of all benchmarks."""
    return ", ".join(sorted(path.stem for path in BENCHMARKS.glob("*.yaml")))


def path_of(name: str) -> Path:
    """Returns the path of a benchmark's configuration, by path or name."""
    for path in (Path(name), BENCHMARKS / f"{name}.yaml"):
        if path.is_file():
            return path
    raise UsageError(f"--benchmarks {name}: no such file. Give the path of a configuration, or one of {known()}")


def names_in(path: Path) -> list[str]:
    """Returns the names of the validations in a configuration."""
    try:
        return [*yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["validations"]]
    except (yaml.YAMLError, OSError, KeyError, TypeError) as error:
        raise UsageError(
            f"--benchmarks {path}: {type(error).__name__}: {error}: give a configuration with data.validations"
        ) from error
