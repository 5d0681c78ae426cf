"""`validations.jsonl`: the values of every question, alike for any number of ranks; as a program, its two ranks."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Grpo
from helpers.fitting import Digits, Echo, fit, scalars, sgd
from helpers.two_ranks import STRATEGIES, as_program, in_every_way
from PIL import Image

from grpo_lightning import Question, StepCheckpoint, TaskData, ValidationValues
from grpo_lightning.plugins.looking.loggers import json_lines
from grpo_lightning.tasks.question_digest import digest_of_question
from grpo_lightning.types import Sample

NUM_QUESTIONS = 23  # two ranks get 12 and 11 of them
UNGRADED = 3
"""A row whose answers the grader does not grade."""


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "validations.jsonl").read_text(encoding="utf-8").splitlines()]


def without_clock(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def graded(sample: Sample, share: float) -> float:
    is_ungraded = sample.prompt.question.source == f"echo:{UNGRADED}"
    return math.nan if is_ungraded else share + (sample.prompt.id % 7) / 8


def runs(folder: Path, parts: bool, **trainer: Any) -> dict[str, Any]:
    """A run that learns nothing, so that ranks differ by no rounding."""
    options = {"max_epochs": 1, "limit_val_batches": 1.0} | trainer
    data = TaskData(Echo(), val_batch_size=5, val_limit=NUM_QUESTIONS)
    rewards = [Digits(change=graded)]
    optimizer = lambda parameters: sgd([{"params": [*parameters], "lr": 0.0}])  # noqa: E731
    fit(folder, [ValidationValues()], trainer=options, data=data, rewards=rewards, optimizer=optimizer)
    return {"lines": without_clock(lines_of(folder)), "scalars": scalars(folder)}


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return in_every_way(__file__, tmp_path_factory.mktemp("values"), runs)


def test_values_are_in_the_order_of_the_questions_for_any_number_of_ranks(all_runs: dict[str, dict[str, Any]]) -> None:
    lines = all_runs["whole"]["lines"]
    assert [line["step"] for line in lines] == [-1, 0]
    for strategy in STRATEGIES:
        assert all_runs[strategy]["lines"] == lines
    values = lines[0]["values"]
    assert [*values] == ["greedy", "avg@2", "pass@2", "maj@2"]
    for metric_values in values.values():
        assert [row for row, value in enumerate(metric_values) if value is None] == [UNGRADED]
        assert len(metric_values) == NUM_QUESTIONS
    # The share of digits is at most 1, so row 6 has a larger value than row 7.
    assert values["greedy"][6] >= 6 / 8 and 0 <= values["greedy"][7] <= 1


def test_the_curves_are_the_means_of_the_values(all_runs: dict[str, dict[str, Any]]) -> None:
    for run in all_runs.values():
        for line in run["lines"]:
            for name, values in line["values"].items():
                numbers = [value for value in values if value is not None]
                logged = run["scalars"][f"val/{name}"][line["step"]]
                assert logged == pytest.approx(sum(numbers) / (NUM_QUESTIONS - 1), rel=1e-6)


def test_a_line_has_the_clocks_of_the_report(tmp_path: Path) -> None:
    trainer = {"max_epochs": 2, "limit_val_batches": 1}
    fit(tmp_path, [ValidationValues()], loop={"mu": 2}, trainer=trainer)
    logged = scalars(tmp_path, without=())
    tokens, seconds = ([*logged[name].values()] for name in ("rollout/tokens", "time/step"))
    lines = lines_of(tmp_path)
    assert [line["tokens"] for line in lines] == [0, tokens[0], sum(tokens)]
    assert [line["seconds"] for line in lines] == pytest.approx([0, seconds[0], sum(seconds)], rel=1e-6)
    assert [line["updates"] for line in lines] == [0, 2, 4]
    assert {(line["name"], line["grader"], line["k"]) for line in lines} == {("", "Digits", 2)}


def test_a_resumed_run_repeats_no_line(tmp_path: Path) -> None:
    def go(folder: Path, end: int, ckpt_path: str | None = None) -> None:
        trainer = {"max_epochs": end, "limit_val_batches": 1}
        fit(folder, [ValidationValues(), StepCheckpoint(keep=-1)], trainer=trainer, ckpt_path=ckpt_path)

    go(tmp_path / "whole", 3)
    go(tmp_path / "cut", 1)
    go(tmp_path / "cut", 2, "last")
    # The program is killed in the middle of a line, after a validation that the checkpoint does not have.
    path = tmp_path / "cut" / "validations.jsonl"
    path.write_text(path.read_text() + json.dumps(lines_of(tmp_path / "cut")[-1] | {"step": 2}) + '\n{"name": "')
    go(tmp_path / "cut", 3, "last")
    assert without_clock(lines_of(tmp_path / "cut")) == without_clock(lines_of(tmp_path / "whole"))
    assert [line["step"] for line in lines_of(tmp_path / "cut")] == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    "trainer", [{"limit_val_batches": 0}, {"fast_dev_run": True}, {"limit_val_batches": 0.0, "num_sanity_val_steps": 2}]
)
def test_without_validation_there_is_no_file(trainer: dict[str, Any], tmp_path: Path) -> None:
    fit(tmp_path, [ValidationValues()], trainer={"max_epochs": 1} | trainer)
    assert not (tmp_path / "validations.jsonl").exists()


def test_a_sanity_check_writes_nothing(tmp_path: Path) -> None:
    options = {"max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    fit(tmp_path, [ValidationValues()], loop={"validate_first": False}, trainer=options)
    assert [line["step"] for line in lines_of(tmp_path)] == [0]


class Echoed(Echo):
    """As `Echo`, but for one question."""

    def __init__(self, row: int, **changes: Any) -> None:
        self.row = row
        self.changes = changes

    def questions(self, split: str) -> list[Question]:
        questions = super().questions(split)
        for name, value in self.changes.items():
            setattr(questions[self.row], name, value)
        return questions


def test_the_digest_tells_other_questions(tmp_path: Path) -> None:
    def digest(task: Echo, **options: Any) -> str:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        data = TaskData(task, val_batch_size=5, **options)
        fit(folder, [ValidationValues()], trainer={"max_epochs": 1, "limit_val_batches": 1.0}, data=data)
        (questions,) = {line["questions"] for line in lines_of(folder)}
        return questions

    tasks = Echo(), Echoed(7, text="444ab"), Echoed(7, answer="4"), Echoed(7, source="elsewhere")
    plain, other_text, other_answer, other_source = map(digest, tasks)
    assert len({plain, other_text, other_answer, digest(Echo(), val_limit=23)}) == 4
    assert other_source == plain and len(plain) == 16 and int(plain, 16) >= 0


def test_the_digest_tells_other_images() -> None:
    pixels = Image.new("RGB", (2, 2))
    variants: list[tuple[Any, ...]] = [(), (Path("a/x.png"),), (Path("y.png"),), (b"1",), (b"2",), (b"2", b"1")]
    variants += [(pixels,), (Image.new("RGB", (2, 2), "red"),)]
    digests = [digest_of_question(Question("1+1=", "2", images=images)) for images in variants]
    assert len({*digests}) == len(variants)
    # The folder may be another on another machine; a copy of an image has the same pixels.
    same = Question("1+1=", "2", images=("b/x.png",)), Question("1+1=", "2", images=(pixels.copy(),))
    assert [digest_of_question(question) for question in same] == [digests[1], digests[6]]


def test_every_run_of_the_command_line_has_the_file(grpo: Grpo) -> None:
    grpo.ok("fit")
    assert [line["step"] for line in lines_of(Path("run"))] == [-1, 0]


def test_records_that_are_no_records_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    json_lines.append(path, [{"step": 1}, {"step": 2}])
    path.write_text('[1]\n{"stop": 1}\n' + path.read_text() + '{"step":')
    json_lines.drop_later(path, 1)
    assert path.read_text() == '{"step": 1}\n'


if __name__ == "__main__":
    as_program(runs)
