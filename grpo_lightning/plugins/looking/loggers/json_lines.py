"""Files of a run with a JSON record per line, each with its step."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lightning import disk


def append(path: Path, records: Sequence[Any]) -> None:
    """Adds records to the end of a file, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:  # as JSON has lone surrogates
        file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def drop_later(path: Path, last_step: int) -> None:
    """Removes the records of steps after `last_step`, which a resumed run repeats, and a half-written line."""
    if not path.exists():
        return
    # Not splitlines, which also splits at characters that a model may write inside a text.
    *lines, unfinished_line = path.read_text(encoding="utf-8").split("\n")
    earlier_lines = [line for line in lines if step_of(line) <= last_step]
    if unfinished_line or earlier_lines != lines:
        disk.write_whole(path, "".join(line + "\n" for line in earlier_lines))


def step_of(line: str) -> float:
    """Returns the step of a record; infinity for a line that is not a record."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
