"""Private names of argparse and jsonargparse that the help relies on, as of jsonargparse 4.53."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import DefaultHelpFormatter

OVERRIDDEN: Mapping[type, tuple[str, ...]] = {
    # It prints defaults as Python does, and types with their modules.
    DefaultHelpFormatter: ("_expand_help",),
}


def show_last(parser: argparse.ArgumentParser, groups: Sequence[Any]) -> None:
    """Shows these groups of options last in a parser's help, in their order."""
    first_groups = [group for group in parser._action_groups if group not in groups]
    parser._action_groups = [*first_groups, *groups]


def retitle(parser: argparse.ArgumentParser, key: str, title: str) -> None:
    """Gives the group that has the option `key` another title."""
    for group in parser._action_groups:
        if any(action.dest == key for action in group._group_actions):
            group.title = title


def rename_flags(parser: argparse.ArgumentParser, flag: str, name: str) -> None:
    """Shows `name` in the help of a parser where its flags begin with `flag`."""
    for action in parser._actions:
        action.option_strings = [re.sub(f"^{re.escape(flag)}(?=[.]|$)", name, text) for text in action.option_strings]
