"""A reward behind a gate."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from helpers.fitting import Exact
from helpers.tiny import samples_of

from grpo_lightning import (
    FormatReward,
    FunctionReward,
    Gated,
    OverlongPenalty,
    Reward,
    RewardResult,
    Run,
    Scorer,
    Scores,
    Segment,
)
from grpo_lightning.types import Question, Sample, UsageError


class Says(Reward):
    """Values and statuses that a test gives by the completion's text."""

    def __init__(self, results: dict[str, tuple[float, str]], segments: bool = False) -> None:
        super().__init__()
        self.results, self.segments, self.calls = results, segments, list[str]()

    def read_questions(self, questions: Sequence[Question]) -> None:
        self.calls.append("read_questions")

    def setup(self, run: Run) -> None:
        self.calls.append("setup")

    def close(self) -> None:
        self.calls.append("close")

    def stop_if_broken(self, statuses: Counter[str]) -> None:
        self.calls.append(str(dict(statuses)))

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        values = [self.results[sample.text][0] for sample in samples]
        segments = [[Segment(0, value), Segment(1, 2 * value)] for value in values] if self.segments else None
        return RewardResult(values, [self.results[sample.text][1] for sample in samples], segments=segments)


def test_correctness_gates_format():
    reward = Gated(FormatReward(), Exact())
    good, wrong = "<think>a</think><answer>1</answer>", "<think>a</think><answer>2</answer>"
    result = reward(samples_of(good, wrong, "#### 1", "#### 2", "what?"))
    assert result.value == [1, 0, 0, 0, 0]
    assert result.status == ["ok", "closed", "no_match", "no_match", "no_answer-no_match"]
    assert result.answer == ["1", "2", "1", "2", None]
    reward.close()


def test_a_failure_of_the_gate_is_nan_and_one_behind_a_closed_gate_is_not():
    gate = Says({"a": (1, "ok"), "b": (0, "ok"), "c": (math.nan, "timeout"), "d": (0.5, "ok")})
    inner = Says({"a": (math.nan, "crash"), "b": (math.nan, "crash"), "c": (3, "ok"), "d": (3, "ok")})
    result = Gated(inner, gate)(samples_of("a", "b", "c", "d"))
    assert result.status == ["crash", "crash", "timeout", "closed"]
    assert [None if math.isnan(value) else value for value in result.value] == [None, 0, None, 0]
    assert Gated(inner, gate, threshold=0.4)(samples_of("d")).value == [3]


def test_segments_behind_a_closed_gate_are_worth_nothing():
    result = Gated(Says({"a": (3, "ok"), "b": (3, "ok")}, segments=True), Says({"a": (1, "ok"), "b": (0, "ok")}))(
        samples_of("a", "b")
    )
    assert result.segments == [[Segment(0, 3), Segment(1, 6)], [Segment(0, 0), Segment(1, 0)]]


def test_both_are_prepared_and_closed():
    inner, gate = Says({}), Says({})
    reward = Gated(inner, gate)
    reward.read_questions([])
    reward.setup(Run(torch.device("cpu"), None, 8))
    reward.close()
    assert inner.calls == gate.calls == ["read_questions", "setup", "close"]


def test_each_of_the_two_checks_its_statuses():
    gate = Says({"a": (1, "ok"), "b": (0, "timeout")})
    inner = Says({"a": (1, "no_match"), "b": (0, "ok")})
    reward = Gated(inner, gate)
    scorer = Scorer([reward])
    for _ in range(2):  # two rounds of one step
        scorer(samples_of("a", "b"))
    scorer.stop_if_broken()
    assert gate.calls == ["{'ok': 2, 'timeout': 2}"]
    assert inner.calls == ["{'no_match': 2, 'ok': 2}"]


def test_it_scores_early_and_grades_cheaply_if_both_do() -> None:
    assert Gated(FormatReward(), Exact()).scores_early
    assert not Gated(OverlongPenalty(3), Exact()).scores_early
    waits = FunctionReward("a.b", concurrency=4)
    assert Gated(FormatReward(), Exact()).grades_cheaply and not Gated(FormatReward(), waits).grades_cheaply


def constant(sample: Sample) -> float:
    return 0.25


def test_a_plain_function_may_be_the_gate() -> None:
    assert isinstance(Gated(FormatReward(), constant).gate, FunctionReward)  # type: ignore[arg-type]


class Learns(Says):
    """A reward that learns."""

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        return {}


def test_a_reward_that_learns_is_refused():
    with pytest.raises(UsageError, match="gate=Learns"):
        Gated(FormatReward(), Learns({}))
