"""The page of the commands, with all their options, from the parsers that the commands make."""

import argparse
import re
import textwrap
from importlib import import_module
from typing import Any
from unittest.mock import patch

from grpo_lightning.command.overview import COMMANDS, overview
from reference import configuration
from reference.options import Option, ParserIsReadyError, options_of_command

CONFIGURED = [name for name, command in COMMANDS.items() if command.module == "grpo_lightning.cli"]
"""The commands that read a configuration."""

VERIFY = ("grpo-verify", "grpo_lightning.plugins.rewards.verifier.verify_command")
"""A program of its own, and its module."""

HELP_OF_FILES = {
    "config": "A YAML file with keys. `grpo_lightning:quickstart` names a file that is installed with the package. "
    "A later file, and every option after it, replaces what an earlier one set.",
    "print_config": "Prints every key with its value, and ends. `--print_config=skip_default` leaves out the defaults.",
}
"""The help of the options about files: the help of jsonargparse is about any program."""


def plain_parser_of(module: str) -> argparse.ArgumentParser:
    """Returns the parser that the `main` of a module makes: `main` runs until the parser is to read arguments."""
    at_reading = patch.object(
        argparse.ArgumentParser, "parse_known_args", autospec=True, side_effect=ParserIsReadyError()
    )
    with at_reading as reading:
        try:
            import_module(module).main([])
        except ParserIsReadyError:
            parser: argparse.ArgumentParser = reading.call_args.args[0]
            return parser
    raise AssertionError(module)


def page() -> str:
    """Returns the page."""
    lines = ["# Commands", "", "`grpo` has these commands. `grpo COMMAND --help` prints the options of one.", ""]
    lines += [f"- [`grpo {name}`](#grpo-{name}): {command.summary}" for name, command in COMMANDS.items()]
    lines += [f"- [`{VERIFY[0]}`](#{VERIFY[0]}): {summary_of(VERIFY[1])}", ""]
    for name, command in COMMANDS.items():
        lines += [f"## `grpo {name}` {{ #grpo-{name} }}", ""]
        if name in CONFIGURED:
            lines += [command.summary, "", *configured_lines(name)]
        else:
            lines += plain_lines(plain_parser_of(command.module), f"grpo-{name}")
    name, module = VERIFY
    lines += [f"## `{name}` {{ #{name} }}", "", *plain_lines(plain_parser_of(module), name)]
    lines += ["## What `grpo --help` prints { #help }", "", "```text", overview(), "```", ""]
    return "\n".join(lines)


def configured_lines(name: str) -> list[str]:
    """Returns the text of a command that reads a configuration."""
    keys_of_fit = {option.key for option in options_of_command("fit")}
    own_options = [option for option in options_of_command(name) if option.key not in keys_of_fit]
    missing_keys = keys_of_fit - {option.key for option in options_of_command(name)}
    links = [f"[`{page}`](configuration/{page}.md)" for page in configuration.SECTION_PAGES]
    lines = [
        "```text",
        f"grpo {name} [--config FILE ...] [--KEY VALUE ...]",
        "```",
        "",
        f"Its options are the keys of the configuration: {', '.join(links)}.",
        "",
    ]
    if missing_keys:
        lines += [f"It does not take {', '.join(f'`{key}`' for key in sorted(missing_keys))}.", ""]
    if name == "fit":
        lines += [
            "### `-c FILE`, `--config FILE` { #grpo-fit--config }",
            "",
            HELP_OF_FILES["config"],
            "",
            "### `--print_config` { #grpo-fit--print_config }",
            "",
            HELP_OF_FILES["print_config"],
            "",
        ]
    else:
        lines += ["[`--config`](#grpo-fit--config) and [`--print_config`](#grpo-fit--print_config) are as for fit.", ""]
    for option in own_options:
        lines += own_option_lines(f"grpo-{name}", option)
    return lines


def own_option_lines(command: str, option: Option) -> list[str]:
    """Returns the text of an option that is no key of `grpo fit`."""
    default = "**required**" if option.is_required else f"default `{option.default_text}`"
    heading = f"### `--{option.key}` {{ #{command}--{option.key} }}"
    return [heading, "", f"`{option.type}` · {default}", "", option.text, ""]


def plain_lines(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Returns the text of a command whose options are no keys of a configuration."""
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ").replace("[-h] ", "")).strip()
    lines = [*description_lines(parser), "```text", usage, "```", ""]
    for action in parser._actions:
        if action.dest != "help":
            lines += option_lines(command, action)
    return lines


def description_lines(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the description of a command. Indented paragraphs are examples: a block of text."""
    lines: list[str] = []
    for paragraph in (parser.description or "").replace("%%", "%").strip().split("\n\n"):
        block = textwrap.dedent(paragraph)
        lines += [paragraph, ""] if block == paragraph else ["```text", block, "```", ""]
    return lines


def summary_of(module: str) -> str:
    """Returns the first sentence of a program's description."""
    text = description_lines(plain_parser_of(module))[0].partition(": ")[2]
    return text[:1].upper() + text[1:]


def option_lines(command: str, action: argparse.Action) -> list[str]:
    """Returns the heading and the text of an argument of a command."""
    value = value_of(action)
    if action.option_strings:
        name = "`, `".join(f"{flag} {value}".strip() for flag in action.option_strings)
        anchor = f"{command}{action.option_strings[-1]}"
    else:
        name = value
        anchor = f"{command}-{action.dest}"
    facts = facts_of(action)
    return [f"### `{name}` {{ #{anchor} }}", "", *([facts, ""] if facts else []), sentence(action), ""]


def value_of(action: argparse.Action) -> str:
    """Returns the word that stands for an argument's value, as in the usage."""
    if action.nargs == 0:
        return ""
    word = action.metavar or action.dest.upper()
    return f"{word} ..." if action.nargs == "+" else f"[{word}]" if action.nargs == "?" else str(word)


def facts_of(action: argparse.Action) -> str:
    """Returns the line with type, default and choices; empty for a switch."""
    if action.nargs == 0:
        return ""
    kind: Any = action.type or str
    parts = [f"`{kind.__name__}`"] if isinstance(kind, type) else []
    if action.required:
        parts += ["**required**"]
    elif action.default not in (None, "", argparse.SUPPRESS, []):
        default = action.default
        parts += [f"default `{' '.join(default) if isinstance(default, list) else default}`"]
    if action.choices:
        parts += ["one of " + ", ".join(f"`{choice}`" for choice in action.choices)]
    return " · ".join(parts)


def sentence(action: argparse.Action) -> str:
    """Returns the help of an argument as a sentence."""
    text = " ".join(str(action.help or "").replace("%%", "%").split())
    if not re.match(r"k\b", text):  # the k of avg@k
        text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."
