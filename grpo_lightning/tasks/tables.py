"""Questions from tables: files on disk and datasets of the Hub."""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.types import Question, UsageError, at_least


class _Table(Task):
    """The common part of tables: the columns that a question is made of, and which rows are left out."""

    def __init__(self, question: str, answer: str, answer_pattern: str, max_lines: int | None) -> None:
        at_least("data.task.max_lines", max_lines, 1)
        self.question = question
        self.answer = answer
        self.answer_pattern = _compiled(answer_pattern)
        self.max_lines = max_lines

    def _questions(self, rows: Iterable[tuple[int, Any]], table: str, source: str, split: Split) -> list[Question]:
        """The questions of numbered rows; an exception stands for a row that cannot be read.

        Raises:
            UsageError: There are no rows, or bad ones; the message names the first.
        """
        read: list[tuple[Question, Any]] = []
        bad: list[tuple[int, str]] = []
        for number, row in rows:
            try:
                read.append((self._question(f"{source}:{number}", row, split), row))
            except UsageError as error:
                bad.append((number, str(error)))
        if bad:
            raise UsageError(_in_words(bad, table, len(read) + len(bad)))
        if not read:
            raise UsageError(f"data.task.{split}: {table} has no rows: give a table with at least one question")
        most = math.inf if self.max_lines is None or split == "predict" else self.max_lines
        questions = [question for question, row in read if most == math.inf or num_lines(row[self.answer]) <= most]
        if not questions:
            raise UsageError(
                f"data.task.max_lines={self.max_lines}: each of the {len(read)} answers of {table} has more lines; "
                "give more"
            )
        return questions

    def _question(self, source: str, row: Any, split: Split) -> Question:
        if isinstance(row, UsageError):
            raise row
        if not isinstance(row, dict):
            raise UsageError(f"expected an object of columns and values, found {_kind(row)}")
        try:
            json.dumps(row, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:  # JSON can escape halves of a character: "\ud83d"
            raise UsageError(f"{error.object[error.start]!r} is half a character: fix the row") from error
        text = self._cell(row, "question", self.question)
        if text is None:
            raise UsageError(f"column {self.question!r} (data.task.question) is empty: every row needs a question")
        answer = self._gold(row, split)
        metadata = {key: value for key, value in row.items() if key not in (self.question, self.answer)}
        return Question(text, answer, source, metadata)

    def _gold(self, row: dict[str, Any], split: Split) -> str:
        if split == "predict" and self.answer not in row:
            return ""
        cell = self._cell(row, "answer", self.answer)
        if cell is None:
            if split == "predict":
                return ""
            raise UsageError(f"column {self.answer!r} (data.task.answer) is empty: every row needs a gold answer")
        if self.answer_pattern is None:
            return cell.strip()
        matches = self.answer_pattern.findall(cell)
        if not matches:
            raise UsageError(
                f"data.task.answer_pattern={self.answer_pattern.pattern!r} is not found in column "
                f"{self.answer!r}, which ends in {cell[-60:]!r}: fix the row or the pattern"
            )
        if not matches[-1].strip():
            raise UsageError(
                f"data.task.answer_pattern={self.answer_pattern.pattern!r} finds an empty answer in "
                f"column {self.answer!r}: fix the row or the pattern"
            )
        return matches[-1].strip()

    @staticmethod
    def _cell(row: dict[str, Any], key: str, column: str) -> str | None:
        """The text of a cell; None if it is empty."""
        if column not in row:
            raise UsageError(
                f"no column {column!r} (data.task.{key}={column!r}); there are "
                f"{', '.join(map(repr, row)) or 'none'}: fix the row or set data.task.{key}"
            )
        cell = row[column]
        if isinstance(cell, Number) and not isinstance(cell, bool):
            cell = str(cell)
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            return None
        if not isinstance(cell, str):
            raise UsageError(f"column {column!r} (data.task.{key}) is {_kind(cell)}, expected text or a number")
        return cell


class JsonPrompts(_Table):
    r"""Questions from your own files: JSON lines, a JSON list of objects, CSV or Parquet, by their ending.

    All columns but the question and the answer go into the question's metadata. Cells are used as they are written
    (CSV is all text); only the answer loses the white space around it.

    Args:
        train: File to train on (.jsonl, .json, .csv or .parquet).
        val: File for validation.
        test: File for testing.
        predict: File to answer; its rows may lack an answer.
        question: Column that holds the question.
        answer: Column that holds the gold answer.
        answer_pattern: Regular expression with one group, whose last match in the answer column is the gold answer,
            such as `####\s*(.+)` for GSM8K. Empty takes the whole cell.
        max_lines: Leave out rows whose answer column has more lines, which are the harder ones where it holds worked
            solutions. `predict` keeps all. GSM8K has a line per segment of a solution, and one for the result.

    Raises:
        UsageError: `answer_pattern` is not a regular expression with one group.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        question: str = "question",
        answer: str = "answer",
        answer_pattern: str = "",  # not None: YAML reads a leading # as a comment, and nothing as null
        max_lines: int | None = None,
    ) -> None:
        super().__init__(question, answer, answer_pattern, max_lines)
        self.paths: dict[str, str | None] = {"train": train, "val": val, "test": test, "predict": predict}

    def questions(self, split: Split) -> Sequence[Question]:
        """The questions of the file of `split`, as in `Task.questions`."""
        given = self.paths.get(split)
        if given is None:
            raise UsageError(f"data.task.{split} is not set: give the path of a .jsonl, .json, .csv or .parquet file")
        path = Path(given).expanduser()
        if not path.is_file():
            folder = path.absolute().parent
            found = "is a folder" if path.is_dir() else f"does not exist (looked in {folder})"
            raise UsageError(f"data.task.{split}={given!r} {found}: give the path of a file")
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            endings = ", ".join(READERS)
            raise UsageError(f"data.task.{split}={given!r}: the ending {path.suffix!r} is not one of {endings}")
        return self._questions(reader(path), str(path), path.name, split)


class HubPrompts(_Table):
    r"""Questions from a dataset of the Hugging Face Hub, or from a folder laid out like one.

    All columns but the question and the answer go into the question's metadata.

    Args:
        id: The dataset, such as `openai/gsm8k`.
        config: Its configuration, such as `main`, where it has several.
        train: Name of its split to train on; slices such as `train[:-500]` are allowed.
        val: Name of its split for validation, such as `train[-500:]`.
        test: Name of its split for testing.
        predict: Name of its split to answer; its rows may lack an answer.
        question: Column that holds the question.
        answer: Column that holds the gold answer.
        answer_pattern: Regular expression with one group, whose last match in the answer column is the gold answer,
            such as `####\s*(.+)` for GSM8K. Empty takes the whole cell.
        revision: Branch, tag or commit of the dataset; a commit makes the run repeatable.
        max_lines: Leave out rows whose answer column has more lines, which are the harder ones where it holds worked
            solutions. `predict` keeps all. GSM8K has a line per segment of a solution, and one for the result.

    Raises:
        UsageError: `answer_pattern` is not a regular expression with one group.
    """

    def __init__(
        self,
        id: str,
        config: str | None = None,
        train: str | None = "train",
        val: str | None = None,
        test: str | None = "test",
        predict: str | None = None,
        question: str = "question",
        answer: str = "answer",
        answer_pattern: str = "",  # not None: YAML reads a leading # as a comment, and nothing as null
        revision: str | None = None,
        max_lines: int | None = None,
    ) -> None:
        super().__init__(question, answer, answer_pattern, max_lines)
        self.id = id
        self.config = config
        self.revision = revision
        self.names: dict[str, str | None] = {"train": train, "val": val, "test": test, "predict": predict}

    def questions(self, split: Split) -> Sequence[Question]:
        """The questions of the dataset's split for `split`, as in `Task.questions`."""
        import datasets  # takes a second, which other tasks need not wait for

        name = self.names.get(split)
        if name is None:
            raise UsageError(f"data.task.{split} is not set: give the name of a split of {self.id}")
        bars = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            rows = datasets.load_dataset(self.id, self.config, split=name, revision=self.revision)
        except (ConnectionError, datasets.exceptions.DatasetsError, ValueError) as error:
            raise UsageError(
                f"data.task.id={self.id!r} (config={self.config!r}, {split}={name!r}, revision={self.revision!r}) "
                f"could not be loaded: {error.__cause__ or error}: fix the name, or download it first if "
                f"this machine is offline"
            ) from error
        finally:
            if bars:
                datasets.enable_progress_bars()
        table = f"{self.id}/{name}"
        return self._questions(enumerate(rows, 1), table, table, split)


def num_lines(answer: Any) -> int:
    """Lines of an answer cell that are not empty."""
    return sum(bool(line.strip()) for line in str(answer).splitlines())


def _in_words(bad: Sequence[tuple[int, str]], table: str, num_rows: int) -> str:
    """The first of the bad rows, those with faults alike together, and how many there are."""
    faults: dict[str, tuple[str, list[str]]] = {}
    for number, fault in bad[:5]:
        alike = re.sub("'.*?'", "", fault)  # they may differ in what they quote
        faults.setdefault(alike, (fault, []))[1].append(f"{table}:{number}")
    words = "\n".join(f"{', '.join(where)}: {fault}" for fault, where in faults.values())
    return words if len(bad) == 1 else f"{words}\n{len(bad)} of {num_rows} rows are bad"


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if text := _decoded(line).strip():
                    yield number, _parsed(text)
            except UsageError as error:
                yield number, error


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):  # many a .json file holds JSON lines
        return _jsonl(path)
    try:
        return enumerate(_parsed(_decoded(path.read_bytes())), 1)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    header: list[str] | None = None
    number = 1
    with path.open("rb") as file:
        reader = csv.reader(map(_decoded, file), strict=True)
        try:
            for cells in reader:
                row, number = number, reader.line_num + 1  # one with line breaks in its cells has several lines
                if not cells:
                    continue
                if header is None:
                    header = cells
                    if twice := _twice([name for name in cells if name]):
                        yield row, twice
                        return
                elif len(cells) != len(header):
                    yield row, UsageError(f"{len(cells)} cells under a header of {len(header)}: fix the row")
                else:
                    yield row, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            yield number, UsageError(f"not CSV: {error}")
        except UsageError as error:
            yield number, error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow.parquet import (
        ParquetFile,
    )  # `datasets` would read the path as a glob, and copy the file to its cache

    number = 0
    try:
        with ParquetFile(path) as file:
            if twice := _twice(file.schema_arrow.names):
                yield 1, twice
                return
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(f"{path}:{number + 1}: not Parquet: {error}") from error


READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text: {error}") from error


def _twice(names: list[str]) -> UsageError | None:
    """The error of a column that is there twice: only one of them would be read."""
    twice = next((name for name in names if names.count(name) > 1), None)
    return None if twice is None else UsageError(f"two columns are called {twice!r}: rename one")


def _row(cells: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(row := dict(cells)) < len(cells) and (twice := _twice([name for name, _ in cells])):
        raise twice
    return row


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_row)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise UsageError(f"not JSON: {error.msg} at {line}column {error.colno}") from error


def _compiled(pattern: str) -> re.Pattern[str] | None:
    if pattern is None:
        raise UsageError(
            "data.task.answer_pattern=null: in a flag, a leading # begins a comment; write [#], or use a YAML file"
        )
    if not pattern:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"data.task.answer_pattern={pattern!r} is not a regular expression: {error}") from error
    if compiled.groups != 1:
        raise UsageError(
            f"data.task.answer_pattern={pattern!r} has {compiled.groups} groups: give it one, ( ), around the "
            f"answer, and write others as (?: )"
        )
    return compiled


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", str: "text", type(None): "null"}
    return names.get(type(value), type(value).__name__)
