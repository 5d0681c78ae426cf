"""`grpo inspect` as a user calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command import table
from helpers.inspecting import group_of, plain_tokens, step_of, write_records

from grpo_lightning.command.overview import answer
from grpo_lightning.plugins.looking.inspector.inspector_page import NUM_POINTS, RunData, build, curves_of, fitting, main
from grpo_lightning.plugins.looking.inspector.record import FORMAT, path_of, read
from grpo_lightning.types import UsageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with three recorded steps."""
    return write_records(
        tmp_path / "run", [step_of([group_of([plain_tokens(["a", "b"])])], step=step) for step in (1, 2, 3)]
    )


def blocks(page: Path) -> dict[str, object]:
    """The data in a page, by the id of its element."""
    found = {}
    for part in page.read_text(encoding="utf-8").split('<script type="application/json" id="')[1:]:
        name, _, rest = part.partition('">')
        found[name] = json.loads(rest.partition("</script>")[0])
    return found


def steps_in(run: Path) -> list[str]:
    """The elements of the steps in a run's page."""
    page, *steps = blocks(run / "inspect.html")
    assert page == "page"
    return steps


def test_the_page_is_in_the_runs_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'inspect.html'}: 0.1 MB; open it in a browser\n"
    data = blocks(run / "inspect.html")
    assert list(data) == ["page", "step-0-1", "step-0-2", "step-0-3"]
    assert data["step-0-2"] == [json.loads(line) for line in path_of(run, 2).read_text().splitlines()]
    assert str(run) not in (run / "inspect.html").read_text(encoding="utf-8")


def test_a_small_limit_thins_the_steps_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = group_of([plain_tokens(["token"] * 400)])
    run = write_records(tmp_path / "run", [step_of([group], step=step) for step in range(1, 12)])
    size = path_of(run, 5).stat().st_size
    assert main([str(run), "--max_mb", str(3.3 * size / 1e6)]) == 0
    assert "3 of the 11 recorded steps of run are here, evenly spread" in capsys.readouterr().out
    assert steps_in(run) == ["step-0-1", "step-0-6", "step-0-11"]
    # What is left out is not read.
    for step in (2, 5, 9):
        path_of(run, step).write_text("x" * size)
    assert main([str(run), "--max_mb", str(3.3 * size / 1e6)]) == 0
    assert "cannot be read" not in capsys.readouterr().out
    assert main([str(run), "--max_mb", "0"]) == 0
    assert steps_in(run) == ["step-0-11"]


def test_a_record_of_version_0_2_has_the_new_names(tmp_path: Path) -> None:
    """A completion of `examples/calculator/run.yaml`: 12 sampled tokens, 8 of the tool's answer, 8 sampled tokens."""
    old_record = Path(__file__).with_name("record_of_0_2.jsonl").read_text(encoding="utf-8")
    assert '"format": 1' in old_record and '"judge": ' in old_record and '"given": ' in old_record
    path = path_of(tmp_path, 2)
    path.parent.mkdir()
    path.write_text(old_record, encoding="utf-8")
    (record,) = read(tmp_path)
    (completion,) = record.groups[0].completions
    assert record.format == FORMAT and completion.grader == "math_verifier"
    assert completion.tokens.context.tolist() == [False] * 12 + [True] * 8 + [False] * 8
    assert main([str(tmp_path)]) == 0
    head, group = blocks(tmp_path / "inspect.html")["step-0-2"]  # type: ignore[misc]
    (shown,) = group["completions"]
    assert head["format"] == FORMAT and shown["grader"] == "math_verifier" and "judge" not in shown
    assert "context" in shown["tokens"] and "given" not in shown["tokens"]


class Counting(list[int]):
    """A list that counts how often its items are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def test_thinning_many_records_looks_at_few_counts() -> None:
    files, sizes = [Path(str(index)) for index in range(10_000)], Counting([3] * 10_000)
    assert len(fitting(files, sizes, 2000.5 * 3)) == 2000 and sizes.num_read < 20 * 10_000
    assert fitting(files[:1], [3], 0) == files[:1]
    assert fitting(files, sizes, 30_000) == files


MISTAKES = table("""
nowhere => nowhere: there is no such folder
empty => empty: no records in empty/inspect; give the folder of a run with `inspect` on
run --compare empty => empty: no records
run -o /proc/none/page.html => /proc/none/page.html: it cannot be written
run --max_mb -1 => max_mb=-1.0: give 0 or more
""")


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_get_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert answer(["inspect", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("grpo: error: ") and words[0] in error and error.count("\n") == 1


BROKEN = {
    "a step of another file": (0, '"step": 2', '"step": 3', "its name is not that of its step, step-000003.jsonl"),
    "a step that is text": (0, '"step": 2', '"step": "2"', ""),
    "another format": (0, '"format": 2', '"format": 9', "its format is 9, not 2"),
    "no ids": (1, '"ids"', '"idz"', "'ids'"),
    "ids that are no base64": (1, '"ids": "', '"ids": "%', ""),
    "cut": (1, '"vocabulary"', '"voc\n', ""),
    "bytes": (1, '"a"', '"\udcff"', ""),
}
"""What makes a file unreadable: (line, what is there, what then is, what the note says)."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_value_of_another_kind_leaves_the_file_out(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    line, old, new, message = BROKEN[name]
    path = path_of(run, 2)
    lines = path.read_text().splitlines()
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    path.write_bytes(("\n".join(lines) + "\n").encode(errors="surrogateescape"))
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "inspect/step-000002.jsonl cannot be read and is left out: " in out and message in out
    assert steps_in(run) == ["step-0-1", "step-0-3"]
    with pytest.raises(UsageError, match="step-000002") as raised:
        read(run)
    assert message in str(raised.value)


def test_a_folder_and_a_strange_name_among_the_records_are_left_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path_of(run, 9).mkdir()
    path_of(run, 3).rename(path_of(run, 3).with_name("step-abc<script>.jsonl"))  # not a record's name
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "step-000009.jsonl cannot be read and is left out: it cannot be opened" in out
    assert "step-abc" not in out and steps_in(run) == ["step-0-1", "step-0-2"]


def test_fields_of_a_later_version_are_dropped(run: Path) -> None:
    path = path_of(run, 2)
    head, group = map(json.loads, path.read_text().splitlines())
    expected = [json.loads(json.dumps(head)), json.loads(json.dumps(group))]
    completion = group["completions"][0]
    for row in (head, group, completion, completion["tokens"]):
        row["later"] = {"a": [1]}
    path.write_text(f"{json.dumps(head)}\n{json.dumps(group)}\n")
    assert main([str(run)]) == 0
    assert blocks(run / "inspect.html")["step-0-2"] == expected
    assert [record.step for record in read(run)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["inspect/step-000002.jsonl", "config.yaml", "events.out.tfevents.0"])
def test_no_file_of_a_run_is_overwritten(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run / name).touch()
    before = (run / name).read_bytes()
    assert answer(["inspect", str(run), "-o", str(run / name)]) == 2
    assert (run / name).read_bytes() == before
    error = capsys.readouterr().err
    assert "--out" in error and "give the name of a page, such as" in error and ".html" in error
    assert answer(["inspect", str(run), "-o", str(run)]) == 2
    assert "that is a folder" in capsys.readouterr().err


def test_every_value_in_the_page_is_escaped() -> None:
    page = build([RunData('a"><b>', {'1"><b>': ["{}"]}, {}, {}, [])])
    assert "<b>" not in page and page.count("&#34;&gt;&lt;b&gt;") >= 2


def test_curves_are_those_that_the_run_has() -> None:
    points = [(update, float(update)) for update in range(1000)]
    scalars = {
        "reward/mean": points,
        "policy/clip_low": [(0, 0.25), (1, float("nan"))],
        "policy/clip_high": [(0, 0.5)],
        "val/avg@4": [(0, 1.0)],
    }
    curves, _ = curves_of(scalars)
    assert list(curves) == ["reward", "validation", "clipped"]
    assert curves["clipped"] == [(0, 0.75)]
    assert len(curves["reward"]) == NUM_POINTS and curves["reward"][0] == (0, 0) and curves["reward"][-1] == (999, 999)
    assert curves_of({})[0] == curves_of({"policy/kl_old": [(0, 0.0), (1, 0.0)]})[0] == {}
    assert curves_of({"policy/kl_old": [(0, 1.0)]})[0] == {"KL old": [(0, 1.0)]}


NAMES = {
    ("run",): ["run"],
    ("plain/0",): ["plain/0"],
    ("plain/seed_1", "dapo/seed_1"): ["plain/seed_1", "dapo/seed_1"],
    ("first/run", "second/run"): ["first/run", "second/run"],
    ("one", "two"): ["one", "two"],
    ("a/plain/0", "b/plain/0"): ["a/plain/0", "b/plain/0"],
}


@pytest.mark.parametrize(("folders", "names"), NAMES.items(), ids=map(" ".join, NAMES))
def test_a_seed_is_no_name_of_a_run(tmp_path: Path, folders: tuple[str, ...], names: list[str]) -> None:
    paths = [write_records(tmp_path / name, [step_of([group_of([plain_tokens(["a"])])])]) for name in folders]
    compare = ["--compare", *map(str, paths[1:])] if paths[1:] else []
    assert answer(["inspect", str(paths[0]), *compare]) == 0
    page: Any = blocks(paths[0] / "inspect.html")["page"]
    assert [run["name"] for run in page["runs"]] == names
