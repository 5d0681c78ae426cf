"""The configuration of a run as plain values by dotted key, over its steps: what differs, and how values are shown."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.plugins.console.mistakes.renames import CLASSES, new_key
from grpo_lightning.types import UsageError

Config = dict[str, Any]
"""Plain values by dotted key. A class stands under the key that it is the value of, its arguments below."""

IGNORED = {
    *("seed_everything", "loop.seed", "data.seed", "trainer.default_root_dir", "ckpt_path", "config"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "memory.show"),
}
"""Keys in which the runs of one arm may differ: seeds, folders, and options that change the console alone."""

SECRET = re.compile(r"(?i)token|(\w*[_-])?(api_?key|password|passwd|secret|authorization|(access|auth|hf)_?token)")
"""Keys whose values no page, card or logger shows."""
PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")
"""The name and password in an address."""


def without_secrets(value: Any) -> Any:
    """Returns a configuration with `***` in place of keys and passwords, for pages and model cards that others read."""
    if isinstance(value, Mapping):
        return {
            name: "***" if isinstance(inner, str) and inner and SECRET.fullmatch(str(name)) else without_secrets(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    return PASSWORD.sub("***@", value) if isinstance(value, str) else value


def read_config(path: Path) -> dict[str, Any] | None:
    """Reads a run's config.yaml without its secrets; None if there is none."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: it cannot be read ({reason}). Fix it, or remove it to go by the folders") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: it holds no keys. Fix it, or remove it to go by the folders")
    return dict(without_secrets(config))


def comparable(raw: dict[str, Any]) -> Config:
    """Returns the options in which the runs of one arm agree, with `RUN` for the run's folder in paths."""
    trainer = raw.get("trainer")
    root = str(trainer.get("default_root_dir") or "").rstrip("/") if isinstance(trainer, dict) else ""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(inner) for inner in value]
        is_inside = root and isinstance(value, str) and f"{value}/".startswith(f"{root}/")
        return "RUN" + value[len(root) :] if is_inside else value

    return {key: moved(value) for key, value in flat(raw).items() if key not in IGNORED}


def starts_of(folder: Path, newest: dict[str, Any]) -> list[tuple[int, Config]]:
    """Returns the options of each start of a run, and the last step with them; 0 for the newest, which goes on."""
    return [(until, comparable(options)) for until, options in [*earlier(folder), (0, newest)]]


def changes_of(starts: Sequence[tuple[int, Config]]) -> list[str]:
    """Returns what each later start of a run changed, a text per start: `changed at step 5: lr 3e-4 → 1e-4`."""
    changes = []
    for (until, old), (_, new) in pairwise(starts):
        keys = primary(changed(old, new), [old, new])
        texts = ", ".join(f"{key} {value_of(old, key)} → {value_of(new, key)}" for key in keys)
        if keys:
            changes.append(f"changed at step {until + 1}: {texts}")
    return changes


def flat(value: Any, key: str = "") -> Config:
    """Returns plain values by dotted key: `model.optimizer: AdamW`, `model.optimizer.lr: 0.1`; list items by index.

    Options of version 0.2 have their new names.
    """
    if isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        value = dict(enumerate(value))
    key = new_key(key)
    if not isinstance(value, Mapping):
        return {key: value}
    options: Config = {}
    for name, inner in value.items():
        if name == "class_path" and key:
            class_name = str(inner).removeprefix("grpo_lightning.")
            options[key] = CLASSES.get(class_name, class_name)
        else:
            # Arguments stand directly below the key that holds their class.
            are_arguments = name in ("init_args", "dict_kwargs") and "class_path" in value
            options |= flat(inner, key if are_arguments else f"{key}.{name}" if key else str(name))
    return options


def primary(keys: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Returns the keys whose difference is not due to another: arguments of a class that differs are left out."""
    return [
        key
        for key in keys
        if not any(key.startswith(f"{parent}.") for parent in keys) or all(key in config for config in configs)
    ]


def shown(value: Any) -> str:
    """Returns a value of a configuration in a few characters."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        mantissa, _, exponent = f"{value:e}".partition("e")
        if value and exponent and not -3 <= int(exponent) < 6:
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{value:g}"
    if isinstance(value, str):
        return value.rpartition(".")[2] if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value) else value
    return json.dumps(value, ensure_ascii=False, default=str)


UNTIL = "# until step "
"""The beginning of an earlier configuration, before the last step with it, counted from 1."""

CHANGES_NOTHING = {"ckpt_path", "steps", "trainer.max_epochs", "trainer.max_time", "trainer.default_root_dir"}
"""Options that may change when a run goes on, which stays the same run."""


def earlier_files(run: Path) -> list[tuple[int, Path]]:
    """Returns the earlier configurations in the order of their numbers, and the last step of each."""
    numbered = {int(file.suffixes[0][1:]): file for file in run.glob("config.*.yaml") if file.suffixes[0][1:].isdigit()}
    heads = [(file.read_text(encoding="utf-8").partition("\n")[0], file) for _, file in sorted(numbered.items())]
    return [(int(head.removeprefix(UNTIL)), file) for head, file in heads if head.startswith(UNTIL)]


def earlier(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """Reads the earlier configurations that steps were made with, and the last step of each, rising."""
    starts: list[tuple[int, dict[str, Any]]] = []
    for until, file in earlier_files(run):
        with suppress(yaml.YAMLError):  # edited by hand
            options = without_secrets(yaml.safe_load(file.read_text(encoding="utf-8")))
            previous_until = starts[-1][0] if starts else 0
            if until > previous_until and isinstance(options, dict):
                starts.append((until, options))
    return starts


def merged(starts: Sequence[tuple[int, Config]], shown: Callable[[Any], str] = shown) -> dict[str, Any]:
    """Returns the newest options of the `starts`; a value that has changed is `0.0003 → 0.0001 at step 5`."""
    texts: dict[str, str] = {}
    for (until, old), (_, new) in pairwise(starts):
        for key in changed(old, new):
            start = texts.get(key) or value_of(old, key, shown)
            texts[key] = f"{start} → {value_of(new, key, shown)} at step {until + 1}"
    return {**starts[-1][1], **texts}


def value_of(options: Config, key: str, shown: Callable[[Any], str] = shown) -> str:
    """Returns the value of an option as text.

    Of an absent option it returns the list of the classes below it, or a dash with the class that does not list it.
    """
    if key in options:
        return shown(options[key])
    if items := [shown(options[item]) for item in options if re.fullmatch(rf"{re.escape(key)}\.\d+", item)]:
        return f"[{', '.join(items)}]"
    parents = [key[: match.start()] for match in re.finditer(r"\.", key)]
    parent = next((parent for parent in reversed(parents) if isinstance(options.get(parent), str)), None)
    return f"– ({shown(options[parent])} does not list it)" if parent else "–"


def changed(old: Config, new: Config) -> list[str]:
    """Returns the keys whose values differ, except those of the run's length and folder."""
    return [key for key in differing([old, new]) if key not in CHANGES_NOTHING]


def differing(configs: Sequence[Config]) -> list[str]:
    """Returns the keys whose values are not the same in all configurations, in their order."""
    keys = dict.fromkeys(key for config in configs for key in config)
    absent = object()
    return [key for key in keys if any(config.get(key, absent) != configs[0].get(key, absent) for config in configs)]
