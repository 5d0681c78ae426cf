"""The configuration of a run as plain values by dotted key, over its steps: what differs, and how values are shown."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.types import UsageError

Config = dict[str, Any]
"""Plain values by dotted key. A class stands under the key of what it fills, its arguments below."""

IGNORED = {
    *("seed_everything", "loop.seed", "data.seed", "trainer.default_root_dir", "ckpt_path", "config"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "memory.show"),
}
"""Keys in which the runs of one arm may differ: seeds, folders, and what changes the console alone."""


SECRET = re.compile(r"(?i)token|(\w*[_-])?(api_?key|password|passwd|secret|authorization|(access|auth|hf)_?token)")
"""Keys whose values no page, card or logger shows."""
PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")
"""The name and password in an address."""


def without_secrets(value: Any) -> Any:
    """A configuration with `***` in place of keys and passwords: pages and model cards are for others to read."""
    if isinstance(value, Mapping):
        return {
            name: "***" if isinstance(inner, str) and inner and SECRET.fullmatch(str(name)) else without_secrets(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    return PASSWORD.sub("***@", value) if isinstance(value, str) else value


def read_config(path: Path) -> dict[str, Any] | None:
    """A run's config.yaml without its secrets; None if there is none."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{path}: it cannot be read ({why}). Fix it, or remove it to go by the folders") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: it holds no keys. Fix it, or remove it to go by the folders")
    return dict(without_secrets(config))


def comparable(raw: dict[str, Any]) -> Config:
    """The options in which the runs of one arm agree, with the run's own folder cut off its paths."""
    trainer = raw.get("trainer")
    root = str(trainer.get("default_root_dir") or "").rstrip("/") if isinstance(trainer, dict) else ""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(inner) for inner in value]
        is_inside = root and isinstance(value, str) and f"{value}/".startswith(f"{root}/")
        return "RUN" + value[len(root) :] if is_inside else value

    return {key: moved(value) for key, value in flat(raw).items() if key not in IGNORED}


def starts_of(folder: Path, newest: dict[str, Any]) -> list[tuple[int, Config]]:
    """The options of a run's starts, and the last step with each, 0 for the newest, which goes on."""
    return [(until, comparable(options)) for until, options in [*earlier(folder), (0, newest)]]


def changes_of(starts: Sequence[tuple[int, Config]]) -> list[str]:
    """The options that a run was started again with: `changed at step 5: lr 3e-4 → 1e-4`, a text per start."""
    found = []
    for (until, old), (_, new) in pairwise(starts):
        keys = primary(changed(old, new), [old, new])
        texts = ", ".join(f"{key} {value_of(old, key)} → {value_of(new, key)}" for key in keys)
        found += [f"changed at step {until + 1}: {texts}"] if keys else []
    return found


def flat(value: Any, key: str = "") -> Config:
    """Plain values by dotted key: `model.optimizer: AdamW`, `model.optimizer.lr: 0.1`; parts of lists by index."""
    if isinstance(value, Mapping):
        found: Config = {}
        for name, inner in value.items():
            if name == "class_path" and key:
                found[key] = str(inner).removeprefix("grpo_lightning.")
            else:
                is_own = name in ("init_args", "dict_kwargs") and "class_path" in value
                found |= flat(inner, key if is_own else f"{key}.{name}" if key else str(name))
        return found
    if isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        return {name: one for i, inner in enumerate(value) for name, one in flat(inner, f"{key}.{i}").items()}
    return {key: value}


def primary(keys: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """The differences that are not due to another: the arguments of a class that differs are left out."""
    return [
        key
        for key in keys
        if not any(key.startswith(f"{other}.") for other in keys) or all(key in config for config in configs)
    ]


def shown(value: Any) -> str:
    """A value of a configuration in a few characters."""
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
"""How an earlier configuration begins: which step, from 1, was the last with it."""

CHANGES_NOTHING = {"ckpt_path", "steps", "trainer.max_epochs", "trainer.max_time", "trainer.default_root_dir"}
"""Options that a run goes on with others of, and stays the same run."""


def earlier_files(run: Path) -> list[tuple[int, Path]]:
    """The earlier configurations in the order of their numbers, and the last step of each."""
    numbered = {int(file.suffixes[0][1:]): file for file in run.glob("config.*.yaml") if file.suffixes[0][1:].isdigit()}
    heads = [(file.read_text(encoding="utf-8").partition("\n")[0], file) for _, file in sorted(numbered.items())]
    return [(int(head.removeprefix(UNTIL)), file) for head, file in heads if head.startswith(UNTIL)]


def earlier(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """The earlier configurations that steps were made with, and the last step of each, rising."""
    found: list[tuple[int, dict[str, Any]]] = []
    for until, file in earlier_files(run):
        with suppress(yaml.YAMLError):  # edited by hand
            options = without_secrets(yaml.safe_load(file.read_text(encoding="utf-8")))
            found += [(until, options)] if until > (found[-1][0] if found else 0) and isinstance(options, dict) else []
    return found


def merged(starts: Sequence[tuple[int, Config]], shown: Callable[[Any], str] = shown) -> dict[str, Any]:
    """The newest options of the `starts`; a value that was another one before is `0.0003 → 0.0001 at step 5`."""
    texts: dict[str, str] = {}
    for (until, old), (_, new) in pairwise(starts):
        for key in changed(old, new):
            start = texts.get(key) or value_of(old, key, shown)
            texts[key] = f"{start} → {value_of(new, key, shown)} at step {until + 1}"
    return {**starts[-1][1], **texts}


def value_of(options: Config, key: str, shown: Callable[[Any], str] = shown) -> str:
    """The value of an option as text; a dash where it is not there."""
    return shown(options[key]) if key in options else "–"


def changed(old: Config, new: Config) -> list[str]:
    """The keys whose values differ, but for those of the run's length and folder."""
    return [key for key in differing([old, new]) if key not in CHANGES_NOTHING]


def differing(configs: Sequence[Config]) -> list[str]:
    """The keys whose values are not the same in all, in their order."""
    keys = dict.fromkeys(key for config in configs for key in config)
    missing = object()
    return [key for key in keys if any(config.get(key, missing) != configs[0].get(key, missing) for config in configs)]
