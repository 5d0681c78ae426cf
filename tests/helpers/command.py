"""The command line of grpo_lightning as a test calls it."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import patch

from grpo_lightning import cli
from grpo_lightning.command.overview import optional
from grpo_lightning.command.parser import Parser
from helpers.tiny import policy_of

OPTIONS = {
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": "1",
    "trainer.default_root_dir": "run",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "model.policy.path": "policy",
    "model.rewards": "[FormatReward]",
    "model.sampling.max_new_tokens": "4",
    "model.validation.samples": "2",
    "data.task": "JsonPrompts",
    "data.task.train": "rows.jsonl",
    "data.task.val": "rows.jsonl",
    "data.task.test": "rows.jsonl",
    "loop.group_size": "2",
    "loop.prompts_per_step": "2",
}
OPTIONS |= {"memory.show": "false"} if optional("MemoryReport") else {}
"""A run of one step in a folder that has rows.jsonl and a tiny model in it."""

LETTERS = '--model.rewards=[{"class_path": "FormatReward", "init_args": {"pattern": ".*[a-m]+.*"}}]'
LEARNS = [
    LETTERS,
    "--model.sampling.max_new_tokens=8",
    "--model.objective.beta=0.04",
    "--model.optimizer=torch.optim.AdamW",
    "--model.optimizer.lr=0.001",
    "--loop.group_size=4",
    "--loop.prompts_per_step=4",
    "--loop.num_minibatches=2",
    "--loop.mu=2",
    "--loop.max_tokens=40",
]
"""Larger steps, from which a tiny model learns something: several updates each, of several micro-batches."""


class Grpo:
    """A subcommand and options in, exit code, stdout and stderr out."""

    def __init__(self, run: Callable[..., tuple[int, str, str]]) -> None:
        self.run = run

    def __call__(self, subcommand: str, *options: str) -> tuple[int, str, str]:
        return self.run(subcommand, *options)

    def ok(self, subcommand: str, *options: str) -> str:
        """What it wrote to stdout; it has ended with exit code 0."""
        code, out, errors = self.run(subcommand, *options)
        assert code == 0, errors
        return out

    def mistake(self, subcommand: str, *options: str) -> str:
        """What it wrote to stderr; it has ended with exit code 2 and a message."""
        code, _, errors = self.run(subcommand, *options)
        assert code == 2 and "Traceback" not in errors, errors
        return errors


def furnish(folder: Path, questions: Mapping[str, int] | None = None, scale: float = 0.2) -> None:
    """Writes a tiny policy, and questions with their answers: the files of OPTIONS."""
    policy_of(scale=scale).save_pretrained(folder / "policy")
    rows = questions or {str(number): number for number in range(8)}
    lines = (f'{{"question": "{question}", "answer": "{answer}"}}\n' for question, answer in rows.items())
    (folder / "rows.jsonl").write_text("".join(lines))


def arguments(subcommand: str, *options: str) -> list[str]:
    """`--key value` of OPTIONS; `options` override them, and `--key!` takes one away, `--key*!` all that begin so."""
    gone = [option.removeprefix("--").removesuffix("!") for option in options if option.endswith("!")]
    base = [f"--{key}={value}" for key, value in OPTIONS.items() if not any(fnmatch(key, name) for name in gone)]
    return [subcommand, *base, *(option for option in options if not option.endswith("!"))]


def table(text: str) -> dict[str, tuple[list[str], list[str]]]:
    """Options, and words of the message about them, from lines `OPTIONS => WORD | WORD`; an indented one goes on."""
    lines = re.sub(r"\n +", " ", text.strip()).splitlines()
    pairs = [line.split(" => ") for line in lines if not line.startswith("#")]
    return {given: (shlex.split(given), words.split(" | ")) for given, words in pairs}


def parser_of_options() -> Parser:
    """The parser of the command line, without reading any options."""
    found: list[Parser] = []

    def parse_args(self: Parser, *args: object) -> None:
        found.append(self)
        raise SystemExit

    with patch.object(Parser, "parse_args", parse_args), patch.object(sys, "argv", ["grpo"]), suppress(SystemExit):
        cli.GRPOCLI(["fit"])
    return found[0]


def refused(grpo: Grpo, options: list[str], words: list[str]) -> str:
    """Asserts that `grpo fit` ends with a message that says all words, and writes nothing; returns what it printed."""
    here = {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*") if "__pycache__" not in path.parts}
    code, out, errors = grpo("fit", *options)
    assert code == 2 and "Traceback" not in errors and errors.count("grpo: error: ") == 1, errors
    assert [word for word in words if word not in errors] == [], errors
    assert out == "" and not Path("run").exists()
    assert here == {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*") if "__pycache__" not in path.parts}
    return errors
