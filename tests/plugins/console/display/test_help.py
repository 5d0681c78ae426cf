"""Help: the commands in one line each, the options in the order of use, and defaults that can be read."""

import re
import sys

import pytest
from helpers.command import Grpo, table

import grpo_lightning.__main__
from grpo_lightning import cli
from grpo_lightning.command import overview
from grpo_lightning.plugins.console.display.help import HelpfulParser

TITLES = ["model", "model.policy", "data", "loop", "checkpoint"]
TITLES += ["completions", "inspect", "predictions", "memory", "trainer"]


@pytest.fixture(scope="module")
def text() -> str:
    """`grpo fit --help`, made once."""
    patch, out = pytest.MonkeyPatch(), []
    patch.setattr("sys.argv", ["grpo"])
    patch.setattr(HelpfulParser, "print_help", lambda self, file=None: out.append(self.format_help()))
    with pytest.raises(SystemExit):
        cli.run(["fit", "--help"])
    patch.undo()
    return out[0]


def test_the_usage_is_one_line(text: str) -> None:
    usage, empty = text.splitlines()[:2]
    assert usage == "usage: grpo fit [--config FILE ...] [--KEY VALUE ...]" and empty == ""


def test_sections_stand_in_the_order_of_use(text: str) -> None:
    lines = text.splitlines()
    first = {key: next(n for n, line in enumerate(lines) if line.startswith(f"  --{key} CONFIG")) for key in TITLES}
    assert sorted(first, key=first.__getitem__) == TITLES
    assert lines.index(next(line for line in lines if line.startswith("  --ckpt_path"))) < first["model"]
    assert first["model"] < 40
    assert not any(line.startswith(("  --model.", "  --data.", "  --loop.")) for line in lines[first["trainer"] :])


def test_defaults_and_classes_are_names(text: str) -> None:
    words = " ".join(text.split())
    for never in ("object at 0x", "class_path", "<class", "grpo_lightning.", "torch.optim.", "known subclasses"):
        assert never not in words
    engines = re.search(r"default: NativeEngine; there are: ([^)]*)\)", words)
    assert engines, words[words.index("--model.engine") :][:400]
    assert {"NativeEngine", "ScriptedEngine", "PlainEngine"} <= {*engines[1].split(", ")}
    assert (
        "default: {surrogate: Clipped, kl: K3, weighting: SequenceMean, correction: NoCorrection, entropy: NoEntropy})"
        in words
    )
    assert "default: AdamW {lr: 1e-06, weight_decay: 0.0}" in words
    assert "--loop.group_size GROUP_SIZE G, completions per prompt. (type: int, default: 8)" in words


HELP = table("""
--model.objective.help => default: Clipped | default: K3 | default: SequenceMean
--model.advantage.help GroupStd => {population,sample} | default: 1e-06
--trainer.logger.help lightning.pytorch.loggers.CSVLogger => required, type: str | Path
--model.objective.surrogate.help Clipped => --model.objective.surrogate.clip_low CLIP_LOW
""")


@pytest.mark.parametrize(("option", "expected"), HELP.values(), ids=HELP)
def test_the_help_of_a_class_is_as_readable(option: list[str], expected: list[str], command: Grpo) -> None:
    words = " ".join(command.ok("fit", "--*!", *option).split())
    assert [part for part in expected if part not in words] == [], words
    assert "object at 0x" not in words and "<class" not in words and "class_path" not in words
    assert words.startswith("usage: grpo ")


@pytest.mark.parametrize("args", [["--help"], []], ids=" ".join)
def test_the_commands_have_one_line_each(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo", *args])
    with pytest.raises(SystemExit) as stopped:
        grpo_lightning.__main__.main()
    out, errors = capsys.readouterr()
    assert stopped.value.code == (0 if args else 2) and (out == "") == (not args)
    lines = (out or errors).splitlines()
    for name, command in overview.COMMANDS.items():
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert line.endswith(command.summary) and len(line) <= 120
    assert len(lines) < 28 and lines[0].startswith("usage: grpo ")


def test_every_command_of_the_command_line_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    read_here = {name for name, command in overview.COMMANDS.items() if command.module == "grpo_lightning.cli"}
    assert read_here == {*cli.GRPOCLI.subcommands(), *cli.command_line("plan").subcommands()}


@pytest.mark.parametrize(("word", "near"), [("fti", "fit"), ("valdate", "validate"), ("qqq", None)])
def test_a_command_that_is_not_there(word: str, near: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert overview.answer([word, "--x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith(f"grpo: error: {word}: there is no such command.") and "init, from-trl, fit, validate" in line
    )
    assert (f"Did you mean {near}?" in line) == (near is not None)
