"""Questions from tables: files on disk."""

import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

from grpo_lightning.tasks.readers import READERS, naming
from grpo_lightning.tasks.task import Split, Task
from grpo_lightning.types import Message, Question, UsageError, at_least, require

ANSWER = "answer"
"""The column of gold answers, if the table has it and no other is set."""
IMAGE = "<image>"
"""Stands in a question, or in an earlier turn, for the next of its images."""


class Table(Task):
    r"""The base of tables: reads questions from columns, and leaves out rows.

    Args:
        question: Column that holds the question, or a conversation: a list of messages with `role` and `content`,
            whose last is the question. Such rows need `data.chat`.
        answer: Column that holds the gold answer. Rows may lack it where neither a reward nor the grader reads it.
        answer_pattern: Regular expression with one group, whose last match in the answer column is the gold answer,
            such as `####\s*(.+)` for GSM8K. Empty takes the whole cell.
        max_lines: Leave out rows whose answer column has more lines: the harder questions, where it holds worked
            solutions. `predict` keeps all. GSM8K has a line per segment of a solution, and a line for the result.
        images: Column that holds an image or a list of images: paths, bytes, or what `datasets` writes for its feature
            `Image`. An image stands where the question says `<image>`, or before it. Empty: the questions are text.
        splits: The value of each split's argument; the subclass reads it in `_table`.
    """

    def __init__(
        self,
        question: str,
        answer: str,
        answer_pattern: str,
        max_lines: int | None,
        images: str = "",
        **splits: str | None,
    ) -> None:
        at_least("data.task.max_lines", max_lines, 1)
        self.question = question
        self.answer = answer
        self.answer_pattern = _compiled(answer_pattern)
        self.max_lines = max_lines
        self.images = images
        self.splits = splits
        self.folder = Path()
        """Where the paths of images begin."""

    @abstractmethod
    def _table(self, split: Split, location: str | None) -> tuple[str, str, Iterable[tuple[int, Any]]]:
        """Returns the table's name in messages, its name in `Question.source`, and its numbered rows."""

    def questions(self, split: Split) -> Sequence[Question]:
        table, source, rows = self._table(split, self.splits.get(split))
        max_lines = None if split == "predict" else self.max_lines
        questions: list[Question] = []
        num_rows = 0
        for number, row in rows:
            with naming(f"{table}:{number}"):
                question = self._question(f"{source}:{number}", row, split)
            num_rows += 1
            num_lines = sum(bool(line.strip()) for line in str(row.get(self.answer)).splitlines())
            if max_lines is None or num_lines <= max_lines:
                questions.append(question)
        require(num_rows > 0, f"data.task.{split}: {table} has no rows: give a table with at least one question")
        if not questions:
            raise UsageError(
                f"data.task.max_lines={max_lines}: each of the {num_rows} answers of {table} has more lines; give more"
            )
        return questions

    def _question(self, source: str, row: Any, split: Split) -> Question:
        require(isinstance(row, dict), f"expected an object of columns and values, found {_kind(row)}")
        cell = row.get(self.images) if self.images else None
        if self.images:
            self._check_column(row, "images", self.images)
            # Rewards and records get an image's name alone.
            row = row | {self.images: _names(cell)}
        try:
            json.dumps(row, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            # JSON can escape halves of a character: "\ud83d".
            raise UsageError(f"{error.object[error.start]!r} is half a character: fix the row") from error
        *history, last_turn = self._turns(row)
        if last_turn["role"] != "user" or is_missing(last_turn["content"]):
            raise UsageError(f"column {self.question!r} ends with {last_turn}: its last turn is the question, of user")

        # A column that was set must be in the row; not every table has gold answers.
        may_lack = self.answer in row or self.answer == ANSWER or split == "predict"
        lacks_answer = may_lack and is_missing(row.get(self.answer))
        answer = "" if lacks_answer else self._gold(self._cell(row, "answer", self.answer))
        metadata = {key: value for key, value in row.items() if key not in (self.question, self.answer)}
        if self.answer_pattern is not None and not lacks_answer:
            metadata.setdefault("solution", str(row[self.answer]))
        images = tuple(_images(cell, self.folder)) or self._images_of_parts(row)
        return Question(last_turn["content"], answer, source, metadata, history, images)

    def _images_of_parts(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the images in the messages of a conversation."""
        contents = [turn["content"] for turn in self._messages(row) if isinstance(turn["content"], list)]
        shown = [item for content in contents for item in content if item.get("type") == "image"]
        images = [image for item in shown for image in _images(item.get("image") or item.get("path"), self.folder)]
        if len(images) < len(shown):
            raise UsageError(
                f"column {self.question!r} shows an image: set data.task.images to the column that holds it"
            )
        return tuple(images)

    def _messages(self, row: dict[str, Any]) -> list[Any]:
        """Returns the messages in the question's column; none if it holds something else."""
        cell = row.get(self.question)
        return cell if isinstance(cell, list) else []

    def _turns(self, row: dict[str, Any]) -> list[Message]:
        """Returns the turns up to the question: one turn if its column holds text, or a conversation's messages."""
        messages = self._messages(row)
        if not messages:
            return [Message(role="user", content=self._cell(row, "question", self.question))]
        try:
            return [Message(role=turn["role"], content=_text_of(turn["content"])) for turn in messages]
        except (TypeError, KeyError) as error:
            raise UsageError(
                f"column {self.question!r} (data.task.question) is {str(messages)[:80]}: give text, or a list of "
                "{role, content} with text as content"
            ) from error

    def _gold(self, cell: str) -> str:
        """Returns the gold answer in a cell."""
        if self.answer_pattern is None:
            return cell.strip()
        matches = self.answer_pattern.findall(cell)
        if matches and matches[-1].strip():
            return matches[-1].strip()
        column = f"in column {self.answer!r}"
        fault = f"finds an empty answer {column}" if matches else f"is not found {column}, which ends in {cell[-60:]!r}"
        raise UsageError(
            f"data.task.answer_pattern={self.answer_pattern.pattern!r} {fault}: fix the row or the pattern"
        )

    @staticmethod
    def _cell(row: dict[str, Any], key: str, column: str) -> str:
        """Returns the text of a cell."""
        Table._check_column(row, key, column)
        cell = row[column]
        name = f"column {column!r} (data.task.{key})"
        if key == "answer" and isinstance(cell, list) and all(isinstance(answer, str) for answer in cell):
            cell = ", ".join(cell)
        require(not is_missing(cell), f"{name} is empty: every row needs a {key}")
        if not isinstance(cell, str | Number) or isinstance(cell, bool):
            raise UsageError(f"{name} is {_kind(cell)}, expected text or a number")
        return str(cell)

    @staticmethod
    def _check_column(row: dict[str, Any], key: str, column: str) -> None:
        """Raises UsageError if a row lacks a column."""
        if column not in row:
            raise UsageError(
                f"no column {column!r} (data.task.{key}={column!r}); there are "
                f"{', '.join(map(repr, row)) or 'none'}: fix the row or set data.task.{key}"
            )


class JsonPrompts(Table):
    r"""Reads questions from your files: JSON lines, a JSON list of objects, CSV or Parquet, by their ending.

    All columns but the question and the answer go into the question's metadata; with a pattern the whole answer cell
    does too, as `solution`. Cells are used as they are written (CSV is all text); only the answer loses the white
    space around it. Paths of images begin at the folder of the file.

    Args:
        train: File to train on (.jsonl, .json, .csv or .parquet).
        val: File for validation.
        test: File for testing.
        predict: File to answer; its rows may lack an answer.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        question: str = "question",
        answer: str = "answer",
        # Not None: YAML reads a leading # as a comment, and then the value as null.
        answer_pattern: str = "",
        max_lines: int | None = None,
        images: str = "",
    ) -> None:
        super().__init__(
            question, answer, answer_pattern, max_lines, images, train=train, val=val, test=test, predict=predict
        )

    def _table(self, split: Split, location: str | None) -> tuple[str, str, Iterable[tuple[int, Any]]]:
        if location is None:
            raise UsageError(f"data.task.{split} is not set: give the path of a .jsonl, .json, .csv or .parquet file")
        path = Path(location).expanduser()
        key = f"data.task.{split}={location!r}"
        if not path.is_file():
            fault = "is a folder" if path.is_dir() else f"does not exist (looked in {path.absolute().parent})"
            raise UsageError(f"{key} {fault}: give the path of a file")
        ending = path.suffix.lower()
        require(ending in READERS, f"{key}: the ending {path.suffix!r} is not one of {', '.join(READERS)}")
        self.folder = path.parent
        return str(path), path.name, READERS[ending](path)


def _compiled(pattern: str) -> re.Pattern[str] | None:
    if pattern is None:
        raise UsageError(
            "data.task.answer_pattern=null: in a flag, a leading # begins a comment; write [#], or use a YAML file"
        )
    if not pattern:
        return None
    key = f"data.task.answer_pattern={pattern!r}"
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{key} is not a regular expression: {error}") from error
    if compiled.groups != 1:
        raise UsageError(
            f"{key} has {compiled.groups} groups: give it one, ( ), around the answer, and write others as (?: )"
        )
    return compiled


def _text_of(content: Any) -> str:
    """Returns the text of a message's content, which may be a list of parts with a text each, or an image."""
    if isinstance(content, str):
        return content
    return "".join(IMAGE if item.get("type") == "image" else item["text"] for item in content)


def _images(cell: Any, folder: Path) -> Iterator[Any]:
    """Yields the images of a cell in their order: paths, or what it holds."""
    if isinstance(cell, list):
        for item in cell:
            yield from _images(item, folder)
    elif isinstance(cell, dict):
        # Written by `datasets`; the path tells nothing if there are bytes.
        yield from _images(cell.get("bytes") or cell.get("path"), folder)
    elif isinstance(cell, str) and cell.strip():
        yield folder / Path(cell).expanduser()
    elif cell is not None and not isinstance(cell, str):
        yield cell


def _names(cell: Any) -> Any:
    """Returns the paths in a cell of images; None for an image without a path."""
    if isinstance(cell, list):
        return [_names(item) for item in cell]
    return cell.get("path") if isinstance(cell, dict) else cell if isinstance(cell, str) else None


def is_missing(cell: Any) -> bool:
    """Returns True for a cell that holds nothing: null, blanks, NaN as in pandas and Parquet, or a list of these."""
    if isinstance(cell, list):
        return all(map(is_missing, cell))
    return cell is None or str(cell).strip().lower() in ("", "nan", "nat", "<na>")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", str: "text", type(None): "null"}
    return names.get(type(value), type(value).__name__)
