"""The options of a run over its steps: the newest in `config.yaml`, earlier ones in `config.1.yaml` ..."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

Options = Mapping[str, Any]
"""Plain values by key."""

UNTIL = "# until step "
"""How an earlier configuration begins: which step, from 1, was the last with it."""

CHANGES_NOTHING = {"ckpt_path", "steps", "trainer.max_epochs", "trainer.max_time", "trainer.default_root_dir"}
"""Options that a run goes on with others of, and stays the same run."""


def earlier_files(run: Path) -> list[tuple[int, Path]]:
    """The earlier configurations in the order of their numbers, and the last step of each."""
    files = [file for file in run.glob("config.*.yaml") if file.suffixes[0][1:].isdigit()]
    files.sort(key=lambda file: int(file.suffixes[0][1:]))
    heads = [(file.read_text(encoding="utf-8").partition("\n")[0], file) for file in files]
    return [(int(head.removeprefix(UNTIL)), file) for head, file in heads if head.startswith(UNTIL)]


def earlier(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """The earlier configurations that steps were made with, and the last step of each, rising."""
    found: list[tuple[int, dict[str, Any]]] = []
    for until, file in earlier_files(run):
        with suppress(yaml.YAMLError):  # edited by hand
            options = yaml.safe_load(file.read_text(encoding="utf-8"))
            found += [(until, options)] if until > (found[-1][0] if found else 0) and isinstance(options, dict) else []
    return found


def merged(before: Sequence[tuple[int, Options]], newest: Options, shown: Callable[[Any], str]) -> dict[str, Any]:
    """The newest options; a value that was another one before is `0.0003 → 0.0001 at step 5`.

    Args:
        before: Earlier options, and the last step of each.
        newest: Those from then on.
        shown: A value as text.
    """
    texts = {key: "" for options in (*(one for _, one in before), newest) for key in options}
    for (until, old), (_, new) in pairwise([*before, (0, newest)]):
        for key in changed(old, new):
            start = texts[key] or (shown(old[key]) if key in old else "–")
            texts[key] = f"{start} → {shown(new[key]) if key in new else '–'} at step {until + 1}"
    return {**newest, **{key: text for key, text in texts.items() if text}}


def changed(old: Options, new: Options) -> Iterator[str]:
    """The keys whose values differ, but for those of the run's length and folder."""
    missing = object()
    keys = dict.fromkeys([*old, *new])
    return (key for key in keys if old.get(key, missing) != new.get(key, missing) and key not in CHANGES_NOTHING)
