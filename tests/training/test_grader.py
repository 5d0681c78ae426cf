"""One grader decides what is right, in training as in validation, whatever the rewards pay for."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fitting import Digits, Echo, Steps, fit, resumes_exactly, scalars

from grpo_lightning import FunctionReward, RewardResult
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.tasks.orders import Shuffled
from grpo_lightning.training.evaluation import Validation
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import Sample


def has_digit(sample: Sample) -> bool:
    return any(character.isdigit() for character in sample.text)


class HasDigit(Reward):
    """1 for completions with a digit, else 0; counts what it grades. The ones with an x it cannot grade."""

    num_graded = 0

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        type(self).num_graded += len(samples)
        return RewardResult([math.nan if "x" in one.text else float(has_digit(one)) for one in samples])


class CostlyHasDigit(HasDigit):
    """As `HasDigit`, asked of a server that takes money."""

    grades_cheaply = False


class Graded(Echo):
    """Questions with a grader of their own."""

    grader = f"{__name__}.HasDigit"


SHAPED: dict[str, Callable[[Sample, float], float]] = {
    "brief": lambda sample, _: 0.2 + 0.6 * has_digit(sample) - 0.01 * len(sample.token_ids),
    "low": lambda sample, share: 0.3 * share if has_digit(sample) else -1 + 1e-3 * len(sample.token_ids),
    "sum": lambda sample, share: 0.15 * has_digit(sample) + 0.1 * share + 0.01 * len(sample.token_ids),
}
"""Rewards that are never 0 or 1, and of whose values a bound of 0.5 says nothing."""


class Told(Shuffled):
    """Notes what an order is told."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def observe(self, rewards: Any) -> dict[str, float]:
        self.values += [value for values in rewards.values() for value in values]
        return {}


def graded(steps: Steps) -> list[list[tuple[Sample, bool]]]:
    """The completions of each step that the grader can grade, and what it says."""
    return [
        [(sample, has_digit(sample)) for sample in exploration.samples if "x" not in sample.text]
        for exploration in steps.explorations
    ]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("of_task", [True, False])
def test_the_grader_decides_in_training_too(tmp_path: Path, name: str, of_task: bool) -> None:
    steps, order, num_before = Steps(), Told(), HasDigit.num_graded
    data = TaskData(Graded() if of_task else Echo(), val_batch_size=5, order=order)
    options: dict[str, Any] = {} if of_task else {"grader": HasDigit()}
    rewards = [Digits(name=name, change=SHAPED[name])]
    module = fit(tmp_path / "graded", [steps], data=data, rewards=rewards, **options)
    # Each completion is graded once; there was no validation.
    assert HasDigit.num_graded - num_before == sum(len(one.samples) for one in steps.explorations)
    seen = scalars(tmp_path / "graded")
    for step, pairs in enumerate(graded(steps)):
        for kind, is_right in (("right", True), ("wrong", False)):
            lengths = [len(sample.token_ids) for sample, right in pairs if right == is_right]
            assert seen[f"rollout/length_{kind}"][step] == pytest.approx(mean(lengths))
        finished = [right and not sample.truncated for sample, right in pairs]
        assert seen["rollout/right_and_finished"][step] == pytest.approx(mean(finished))
        assert seen["reward/has_digit/mean"][step] == pytest.approx(mean([right for _, right in pairs]))
    assert {str(value) for value in order.values} == {"0.0", "1.0", "nan"}
    # Nothing is learned from it.
    plain = fit(tmp_path / "plain", rewards=[Digits(name=name, change=SHAPED[name])])
    weights = module.policy.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in plain.policy.state_dict().items())
    assert seen["reward/mean"] == scalars(tmp_path / "plain")["reward/mean"]


def test_a_grader_among_the_rewards_grades_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps, num_before = Steps(), HasDigit.num_graded
    rewards = [Digits(name="brief", change=SHAPED["brief"]), HasDigit(weight=0.5)]
    fit(tmp_path, [steps], rewards=rewards, grader=HasDigit(), max_failed_rewards=1.0)
    assert HasDigit.num_graded - num_before == sum(len(one.samples) for one in steps.explorations)
    lengths = [len(sample.token_ids) for sample, right in graded(steps)[0] if right]
    assert scalars(tmp_path)["rollout/length_right"][0] == pytest.approx(mean(lengths))
    assert "reward > 0.5" not in caplog.text


def test_a_costly_grader_is_asked_in_training_only_if_it_is_a_reward(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shaped() -> Digits:
        return Digits(name="brief", change=SHAPED["brief"])

    num_before = CostlyHasDigit.num_graded
    fit(tmp_path / "beside", rewards=[shaped()], grader=CostlyHasDigit())
    assert CostlyHasDigit.num_graded == num_before
    assert caplog.text.count("brief: reward > 0.5") == 1, "said once in a run"
    caplog.clear()
    steps = Steps()
    grader = CostlyHasDigit()
    fit(
        tmp_path / "among", [steps], rewards=[shaped(), CostlyHasDigit(weight=0)], grader=grader, max_failed_rewards=1.0
    )
    assert CostlyHasDigit.num_graded - num_before == sum(len(one.samples) for one in steps.explorations)
    assert "reward > 0.5" not in caplog.text


def test_a_reward_may_be_named_that_decides_in_training(tmp_path: Path) -> None:
    num_before = HasDigit.num_graded
    rewards = [Digits(change=SHAPED["sum"]), Digits(0.0, name="all", change=lambda sample, share: 1.0)]
    fit(tmp_path, rewards=rewards, correct="all", data=TaskData(Graded()))
    assert HasDigit.num_graded == num_before and "rollout/length_wrong" not in scalars(tmp_path)


def test_a_grader_that_knows_no_answers_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Lost(Reward):
        def score(self, samples: Sequence[Sample]) -> RewardResult:
            return RewardResult([math.nan] * len(samples), ["no_gold"] * len(samples))

    class Raising(Reward):
        def score(self, samples: Sequence[Sample]) -> RewardResult:
            raise ValueError("no such thing")

    fit(tmp_path / "lost", validation=Validation(Lost()))
    assert "rollout/length_right" not in scalars(tmp_path / "lost") and "no gold" not in caplog.text
    assert scalars(tmp_path / "lost")["reward/lost/no_gold"] == {0: 1.0, 1: 1.0, 2: 1.0}
    fit(tmp_path / "raising", validation=Validation(Raising()))
    assert caplog.text.count("reward raising failed on 16 of 16 samples (error: 16)") == 3


def test_resumes_exactly_with_a_grader(tmp_path: Path) -> None:
    options = {"limit_val_batches": 1}
    resumes_exactly(tmp_path, lambda: {"data": TaskData(Graded()), "trainer": {**options}})
    assert "rollout/length_right" in scalars(tmp_path / "cut")


def test_which_graders_are_cheap() -> None:
    waits, plain = FunctionReward("a.b", concurrency=4), FunctionReward("a.b")
    assert plain.grades_cheaply and not waits.grades_cheaply
