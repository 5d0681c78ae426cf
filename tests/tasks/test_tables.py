import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from grpo_lightning import JsonPrompts, Question, UsageError
from grpo_lightning.tasks.task import Split

ROWS = [
    {"question": "1+1?", "answer": "so\n#### 2", "level": "easy"},
    {"question": 'say "a, b"\nand ü', "answer": "#### 1\n#### 1,234 ", "level": "N/A"},
    {"question": " 007?", "answer": "#### 007", "level": ""},
]
GOLDS = ["2", "1,234", "007"]


def write(path: Path, rows: list[dict]) -> Path:
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".csv":
            with path.open("w", newline="", encoding="utf-8-sig") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def questions_of(path: Path, **arguments: Any) -> Sequence[Question]:
    return JsonPrompts(str(path), **arguments).questions("train")


def answers_of(path: Path, **arguments: Any) -> list[str]:
    return [question.answer for question in questions_of(path, **arguments)]


def message(path: Path | str, split: Split = "train", **arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        JsonPrompts(**{split: str(path), **arguments}).questions(split)
    return str(caught.value)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_all_formats_give_the_same_questions(tmp_path: Path, ending: str):
    path = write(tmp_path / f"a [1] b.{ending}", ROWS)
    questions = questions_of(path, answer_pattern=r"####\s*(.+)")
    assert [question.text for question in questions] == [row["question"] for row in ROWS]
    assert [question.answer for question in questions] == GOLDS
    # Where a pattern reads the answer, the whole cell is kept beside the other columns: a gold completion.
    cells = [{"level": row["level"], "solution": row["answer"]} for row in ROWS]
    assert [question.metadata for question in questions] == cells


def test_sources_are_lines(tmp_path: Path):
    jsonl = write(tmp_path / "a.jsonl", ROWS)
    jsonl.write_text("\n" + jsonl.read_text())
    assert [question.source for question in questions_of(jsonl)] == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    table = write(tmp_path / "a.csv", ROWS)  # the first row is on lines 2 and 3, the second on 4 to 6
    assert [question.source for question in questions_of(table)] == ["a.csv:2", "a.csv:4", "a.csv:7"]


def test_json_lines_may_end_in_json(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ROWS).rename(tmp_path / "a.json")
    assert len(JsonPrompts(val=str(path)).questions("val")) == 3


def test_numbers_are_answers_and_types_may_mix(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "a", "a": 42}\n{"q": "b", "a": "x = 1 "}\n{"q": "c", "a": 0.5, "tags": [1]}\n')
    questions = questions_of(path, question="q", answer="a")
    assert [question.answer for question in questions] == ["42", "x = 1", "0.5"]
    assert questions[2].metadata == {"tags": [1]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"question": "a", "answer": }', "not JSON: Expecting value at column 29"),
        ('["a", "b"]', "expected an object of columns and values, found a list"),
        ('{"answer": "1"}', "no column 'question' (data.task.question='question'); there are 'answer'"),
        ('{"question": " ", "answer": "1"}', "column 'question' (data.task.question) is empty"),
        ('{"question": NaN, "answer": "1"}', "column 'question' (data.task.question) is empty: every row needs"),
        ('{"question": [], "answer": "1"}', "column 'question' (data.task.question) is empty"),
        ('{"question": "a", "answer": ["1", null]}', "column 'answer' (data.task.answer) is a list"),
        ('{"question": "a", "answer": [1]}', "column 'answer' (data.task.answer) is a list"),
        ('{"question": true, "answer": "1"}', "column 'question' (data.task.question) is true or false"),
        (
            '{"question": "a", "answer": "so 7"}',
            "data.task.answer_pattern='#(.*)' is not found in column 'answer'",
        ),
        ('{"question": "a", "answer": "# 3 \\ud83d"}', "'\\ud83d' is half a character: fix the row"),
        ('{"question": "a", "answer": "# 3", "tags": ["\\udc00"]}', "'\\udc00' is half a character: fix the row"),
        ('{"question": "a", "answer": "# 3", "answer": "# 4"}', "two columns are called 'answer': rename one"),
        ('{"question": "a", "answer": "# "}', "data.task.answer_pattern='#(.*)' finds an empty answer"),
    ],
)
def test_bad_row_of_jsonl(tmp_path: Path, line: str, expected: str):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "a", "answer": "# 1"}\n' + line + "\n")
    assert message(path, answer_pattern="#(.*)").startswith(f"{path}:2: {expected}")


def test_bad_rows_of_other_formats(tmp_path: Path):
    path = tmp_path / "bad.csv"
    path.write_text('question,answer\n"a\nb",1\n\n,2\n')
    assert f"{path}:5: column 'question' (data.task.question) is empty" in message(path)
    path.write_text("question,answer\na,1\nb,1,2\n")
    assert f"{path}:3: 3 cells under a header of 2" in message(path)
    path.write_text('question,answer\na,1\n"b,1\n')
    assert f"{path}:3: not CSV: unexpected end of data" in message(path)
    path.write_bytes(b"question,answer\n" + b"a,1\n" * 5000 + b"\xff,1\n")
    assert f"{path}:5002: not UTF-8 text" in message(path)

    path = tmp_path / "bad.json"
    path.write_text('[{"question": "a", "answer": "1"},\n {"answer": "1"}]')
    assert f"{path}:2: no column 'question'" in message(path)
    path.write_text('[{"question": "a", "answer": "1"},\n {"question": }]')
    assert f"{path}: not JSON: Expecting value at line 2, column 15" in message(path)

    path = write(tmp_path / "bad.parquet", [{"question": "a", "answer": 1}, {"question": None, "answer": 2}])
    assert f"{path}:2: column 'question' (data.task.question) is empty" in message(path)
    path.write_text("no parquet")
    assert f"{path}: not Parquet" in message(path)


def test_the_first_of_several_bad_rows_is_named(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'\n{"question": "a", "answer": "1"}\n\xff\n{\n')
    assert message(path).startswith(f"{path}:3: not UTF-8 text")


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    path = tmp_path / "bad.csv"
    path.write_text("\nquestion,answer,answer\na,1,2\n")
    assert message(path) == f"{path}:2: two columns are called 'answer': rename one"
    path.write_text("question,answer,,\na,1,,\n")  # as spreadsheets write empty columns
    assert answers_of(path) == ["1"]
    path = path.with_suffix(".parquet")
    parquet.write_table(pyarrow.table([["a"], ["1"], ["2"]], names=["question", "answer", "answer"]), path)
    assert message(path) == f"{path}: two columns are called 'answer': rename one"


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "\n"), ("a.json", "[]"), ("a.csv", "question,answer\n"), ("b.csv", "")]
)
def test_a_table_without_rows_is_refused(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    assert f"data.task.val: {tmp_path / name} has no rows" in message(tmp_path / name, "val")


def test_missing_files_and_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert message("data/a.jsonl") == (
        f"data.task.train='data/a.jsonl' does not exist (looked in {tmp_path}/data): give the path of a file"
    )
    assert "is a folder" in message(tmp_path)
    (tmp_path / "a.txt").touch()
    assert "the ending '.txt' is not one of .jsonl, .json, .csv, .parquet" in message("a.txt")
    with pytest.raises(UsageError, match=r"^data.task.val is not set: give the path"):
        JsonPrompts(train="a.jsonl").questions("val")


@pytest.mark.parametrize("split", ["train", "val", "test", "predict"])
def test_rows_may_lack_a_gold_answer(tmp_path: Path, split: Split):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a"}\n{"question": "b", "answer": null}\n{"question": "c", "answer": "# 3"}\n')
    questions = JsonPrompts(**{split: str(path)}, answer_pattern="#(.*)").questions(split)  # type: ignore[arg-type]
    assert [question.answer for question in questions] == ["", "", "3"]
    assert [question.metadata for question in questions] == [{}, {}, {"solution": "# 3"}]


def test_a_column_of_answers_that_was_named_must_be_there(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [{"question": "a", "level": 1}])
    assert ":1: no column 'solution' (data.task.answer='solution'); there are 'question', 'level'" in message(
        path, answer="solution"
    )
    task = JsonPrompts(predict=str(path), answer="solution")
    assert task.questions("predict")[0].answer == ""


MISSING = ["null", "NaN", '""', '" "', "[]", "[null]", "[NaN, null]", '["", []]', '"nan"', '"NaN"', '"<NA>"']


def test_an_answer_that_is_missing_in_any_form_is_none(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"question": "q{row}", "answer": {cell}}}\n' for row, cell in enumerate(MISSING)))
    assert answers_of(path) == [""] * len(MISSING)
    path = path.with_suffix(".csv")
    path.write_text("question,answer\na,1\nb,\nc,nan\nd,NaN\ne,<NA>\nf,0\ng,Nancy\n")
    assert answers_of(path) == ["1", "", "", "", "", "0", "Nancy"]


def test_a_table_of_pandas_with_missing_answers(tmp_path: Path):
    path = tmp_path / "a.parquet"
    numbers = pyarrow.array([2.0, float("nan"), None, 0.0])
    lists = pyarrow.array([[1.0], [float("nan")], None, []], pyarrow.list_(pyarrow.float64()))
    parquet.write_table(pyarrow.table({"question": list("abcd"), "answer": numbers, "several": lists}), path)
    assert answers_of(path) == ["2.0", "", "", "0.0"]
    assert ":1: column 'several' (data.task.answer) is a list" in message(path, answer="several")


CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": " 1+1? "}]}]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_conversation_is_its_last_turn_and_those_before(tmp_path: Path, ending: str):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    rows = [{"prompt": CHAT[:1]}, {"prompt": [*turns, {"role": "user", "content": "1+1?"}]}, {"prompt": "plain"}]
    path = write(tmp_path / f"a.{ending}", rows[1:2])
    (question,) = questions_of(path, question="prompt")
    assert (question.text, question.history) == ("1+1?", turns)
    path = write(tmp_path / "b.jsonl", [{"prompt": CHAT}, rows[2]])
    first, second = questions_of(path, question="prompt")
    assert (first.text, first.history) == (" 1+1? ", CHAT[:1])
    assert (second.text, second.history) == ("plain", [])
    path = write(tmp_path / f"c.{ending}", rows[:1])
    assert ":1: column 'prompt' ends with {'role': 'system'" in message(path, question="prompt")


@pytest.mark.parametrize(
    "messages",
    [
        '["a"]',
        '[{"role": "user", "content": 3}]',
        '[{"role": "user"}]',
        '[{"content": "a"}]',
        '[{"role": "user", "content": null}]',
        '[{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "a"}]}]',
    ],
)
def test_a_conversation_of_another_form_is_refused(tmp_path: Path, messages: str):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"question": {messages}}}\n')
    assert ":1: column 'question' (data.task.question) is" in message(path)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("(", "is not a regular expression"), ("####.*", "has 0 groups: give it one"), ("(a)(b)", "has 2 groups")],
)
def test_an_answer_pattern_needs_one_group(pattern: str, expected: str):
    with pytest.raises(UsageError, match=re.escape(expected)):
        JsonPrompts(answer_pattern=pattern)


def test_long_solutions_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": "one\n\n#### 1"},
        {"question": "b", "answer": "one\ntwo\n#### 2"},
        {"question": "c", "answer": "one\r\ntwo\r\nthree\n#### 3\n"},
        {"question": "d", "answer": 4},
    ]
    path = str(write(tmp_path / "rows.jsonl", rows))

    def asked(split: Split, max_lines: int | None) -> list[str]:
        task = JsonPrompts(train=path, predict=path, max_lines=max_lines, answer_pattern=r"(\d+)\s*$")
        return [question.text for question in task.questions(split)]

    assert asked("train", None) == ["a", "b", "c", "d"]
    assert asked("train", 3) == ["a", "b", "d"]
    assert asked("train", 2) == ["a", "d"]
    assert asked("predict", 2) == ["a", "b", "c", "d"]
    long = str(write(tmp_path / "long.jsonl", rows[1:3]))
    assert "data.task.max_lines=2: each of the 2 answers of" in message(long, max_lines=2)
    with pytest.raises(UsageError, match=r"data.task.max_lines=0: give 1 or more"):
        JsonPrompts(train=path, max_lines=0)
