"""Translates options of TRL's GRPO by the rules in `trl.yaml`."""

from collections.abc import Mapping
from math import ceil, gcd
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_lightning.types import UsageError

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("trl.yaml").read_text(encoding="utf-8"))
"""The rules; the head of the file explains them."""

RULES: dict[str, dict[str, Any]] = {
    name: rule for section in TABLE["options"].values() for name, rule in section.items()
}
"""The rule of each option of TRL."""


class Setting(NamedTuple):
    """The value of a key, and where it comes from."""

    value: Any
    """The value, as YAML can write it."""
    comment: str
    """The option of TRL, and the arithmetic."""


def translate(
    options: Mapping[str, Any], rows: int = 0, world: int | None = None
) -> tuple[dict[str, Setting], list[str]]:
    """Returns the settings by their dotted keys, and a sentence for what has no counterpart, with what to do.

    Raises UsageError for options that TRL refuses.

    Args:
        options: The values that are set, by TRL's names.
        rows: Number of training questions; 0 if it is not known.
        world: Number of processes; None takes what the options say, or 1.
    """
    scope = scope_of(options, rows, world)
    settings: dict[str, Setting] = {}
    remarks = [f"{name}: TRL {TABLE['version']} has no such option" for name in options if name not in RULES]
    for name, rule in RULES.items():
        text = f"{name}={scope[name]}: "
        comment = rule.get("how", "").format_map(scope)
        for key, expression in rule.get("sets", {}).items():
            value = evaluated(expression, scope)
            if value is not None:
                settings[key] = Setting(value, ("" if name in options else "TRL's default ") + text + comment)
                comment = ""
        differs = "says" in rule and scope[name] != rule["default"]
        if evaluated(rule["if"], scope) if "if" in rule else differs:
            remarks.append(text * (name in options) + rule["says"].format_map(scope))
    # The sections from trainer to checkpoint, each with its keys together.
    ordered = sorted(sorted(settings.items()), key=lambda item: item[0].partition(".")[0], reverse=True)
    return dict(ordered), remarks


def scope_of(options: Mapping[str, Any], rows: int, world: int | None) -> dict[str, Any]:
    """Returns what the rules may name: all options with their values, and the numbers derived from them."""
    # An option that TRL does not have could hide what the rules name.
    scope: dict[str, Any] = {name: options.get(name, rule["default"]) for name, rule in RULES.items()}
    scope |= {"rows": rows, "world": world, "rewards": TABLE["rewards"], "ceil": ceil, "gcd": gcd}
    scope["world"] = evaluated(TABLE["world"], scope)
    for refusal in TABLE["refused"]:
        if evaluated(refusal["if"], scope):
            raise UsageError(refusal["says"].format_map(scope))
    for name, expression in TABLE["derived"].items():
        scope[name] = evaluated(expression, scope)
    return scope


def evaluated(expression: Any, scope: dict[str, Any]) -> Any:
    """Returns the value of an expression of the table, which may name what is in the scope."""
    try:
        return eval(str(expression), scope)
    except (AttributeError, TypeError, ValueError) as error:
        values = ", ".join(f"{name}={scope[name]!r}" for name in RULES if name in str(expression))
        raise UsageError(f"{values}: TRL does not take this either: {error}") from error
