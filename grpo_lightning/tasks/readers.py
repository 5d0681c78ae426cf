"""Readers of tables: the numbered rows of a file."""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_lightning.types import UsageError, require


@contextmanager
def naming(location: str) -> Iterator[None]:
    """Puts a location, such as `train.jsonl:17`, before the message of a UsageError."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{location}: {error}") from error


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            with naming(f"{path}:{number}"):
                if text := _decoded(line).strip():
                    yield number, _parsed(text)


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    # Many .json files hold JSON lines.
    if not start.startswith(b"["):
        return _jsonl(path)
    with naming(str(path)):
        return enumerate(_parsed(_decoded(path.read_bytes())), 1)


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    header: list[str] = []
    with path.open("rb") as file:
        reader = csv.reader(map(_decoded, file), strict=True)
        while True:
            # The first line of the row, which has several lines if its cells have line breaks.
            number = reader.line_num + 1
            with naming(f"{path}:{number}"):
                try:
                    cells = next(reader, None)
                except csv.Error as error:
                    raise UsageError(f"not CSV: {error}") from error
                if cells is None:
                    return
                if cells and header:
                    if len(cells) != len(header):
                        raise UsageError(f"{len(cells)} cells under a header of {len(header)}: fix the row")
                    yield number, dict(zip(header, cells, strict=True))
                elif cells:
                    header = cells
                    _check_names([name for name in header if name])


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile  # `datasets` would read the path as a glob, and copy the file

    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            rows = file.read().to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not Parquet: {error}") from error
    with naming(str(path)):
        _check_names(names)
    return enumerate(rows, 1)


READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text: {error}") from error


def _check_names(names: Sequence[str]) -> None:
    """Raises UsageError if two columns have the same name: only one of them would be read."""
    repeated = next((name for name in names if names.count(name) > 1), None)
    require(repeated is None, f"two columns are called {repeated!r}: rename one")


def _row(cells: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_names([name for name, _ in cells])
    return dict(cells)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_row)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise UsageError(f"not JSON: {error.msg} at {line}column {error.colno}") from error
