"""What every plugin that speaks of right and wrong shows, where the rewards are never 0 or 1."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.fast import fit
from helpers.fitting import Digits, Echo, charts_of, scalars
from helpers.inspecting import completion_of, completions_of, group_of, inspector, plain_tokens, step_of, write_records

from grpo_lightning import MathVerifier, RewardResult
from grpo_lightning.plugins.console.display.first_look import FirstLook
from grpo_lightning.plugins.data.orders.replayed import Replayed
from grpo_lightning.plugins.looking.inspector.inspector_page import RunData
from grpo_lightning.plugins.looking.inspector.record import read
from grpo_lightning.plugins.looking.loggers.sampled_completions import SampledCompletions
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import Sample


def has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)


class HasDigit(Reward):
    """1 for completions with a digit, else 0."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([float(has_digit(sample.text)) for sample in samples])


SHAPED: dict[str, Callable[[Sample, float], float]] = {
    "brief": lambda sample, _: 0.2 + 0.6 * has_digit(sample.text) - 0.03 * len(sample.token_ids),
    "low": lambda sample, share: 0.3 * share if has_digit(sample.text) else -1 + 1e-3 * len(sample.token_ids),
    "sum": lambda sample, share: 0.15 * has_digit(sample.text) + 0.1 * share + 0.01 * len(sample.token_ids),
}


class NotedReplayed(Replayed):
    """Notes how many completions of each group were right."""

    def setup(self, questions: Any, seed: int) -> None:
        super().setup(questions, seed)
        self.solved: list[float] = []

    def learn(self, row: int, rewards: list[float]) -> None:
        self.solved.append(sum(rewards))
        super().learn(row, rewards)


@pytest.mark.parametrize("name", SHAPED)
def test_a_shaped_reward_is_shown_as_the_grader_says(tmp_path: Path, name: str) -> None:
    order = NotedReplayed(most_solved=3, fraction=1.0)
    callbacks = [inspector(), SampledCompletions(every_n_steps=1, num_groups=4), FirstLook()]
    data = TaskData(Echo(), val_batch_size=5, order=order)
    rewards = [Digits(name=name, change=SHAPED[name])]
    fit(tmp_path, callbacks, data=data, rewards=rewards, grader=HasDigit(), trainer={"limit_val_batches": 1})
    completions = [
        one for record in read(tmp_path) for kind in ("train", "validation") for one in completions_of(record, kind)
    ]
    assert {one.right for one in completions} == {True, False}
    for one in completions:
        assert one.grader == "has_digit" and one.right == has_digit(one.text) == (one.scores["has_digit"] == 1)
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert all(row["scores"]["has_digit"] == has_digit(row["completion"]) for row in rows)
    solved = [sum(has_digit(row["completion"]) for row in rows[start : start + 4]) for start in range(0, len(rows), 4)]
    assert order.solved == solved and order.waiting
    assert scalars(tmp_path)["update/delta_logp_right"]
    assert "reward > 0.5" not in "".join(line for step in RunData.read(tmp_path).steps.values() for line in step)


def test_without_a_grader_the_bound_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewards = [Digits(name="brief", change=SHAPED["brief"])]
    fit(tmp_path, [inspector(), FirstLook()], rewards=rewards)
    assert caplog.text.count("what is right in training is decided by brief: reward > 0.5") == 1
    assert "length, right and wrong by brief: reward > 0.5" in [chart.title for chart in charts_of(tmp_path)]
    pages = RunData.read(tmp_path).steps
    assert all('"grader": "brief: reward > 0.5"' in line for _, *groups in pages.values() for line in groups)
    # The record itself has the name by which `scores` has the value.
    assert {one.grader for record in read(tmp_path) for one in completions_of(record)} == {"brief"}


def test_a_reward_of_0_and_1_needs_no_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "own", [inspector()], rewards=[HasDigit()])
    assert "reward > 0.5" not in caplog.text
    assert '"grader": "has_digit"' in RunData.read(tmp_path / "own").steps[3][1]
    fit(tmp_path / "known", [FirstLook()], rewards=[MathVerifier()], trainer={"max_epochs": 1})
    assert "length, right and wrong by math_verifier" in [chart.title for chart in charts_of(tmp_path / "known")]


@pytest.mark.parametrize(
    ("values", "caption"),
    [((0.0, 1.0, None), "brief"), ((0.8, 0.2, None), "brief: reward > 0.5"), ((0.0, 0.3, 1.0), "brief: reward > 0.5")],
)
def test_old_records_say_what_was_taken_for_right(
    tmp_path: Path, values: tuple[float | None, ...], caption: str
) -> None:
    completions = [
        completion_of(
            plain_tokens(["a"]), None if value is None else value > 0.5, grader="brief", scores={"brief": value}
        )
        for value in values
    ]
    nameless = completion_of(plain_tokens(["a"]))
    write_records(tmp_path, [step_of([group_of([], completions=[*completions, nameless])])])
    lines = RunData.read(tmp_path).steps[10]
    assert [completion["grader"] for completion in json.loads(lines[1])["completions"]] == [caption] * 3 + [""]
