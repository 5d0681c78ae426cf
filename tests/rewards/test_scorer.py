"""Scorer: the total, the reward that decides what is right, what rewards learn, and what they need from each other."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fitting import Product
from helpers.tiny import samples_of

from grpo_lightning import Question, Reward, RewardResult, Sample, Scorer, Scores, Status, UsageError


class Count(Reward):
    """The number of one letter; learns the largest it has seen in the step."""

    def __init__(self, letter: str, weight: float = 1.0) -> None:
        super().__init__(weight, name=letter)
        self.letter = letter

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        values = [math.nan if "?" in sample.text else float(sample.text.count(self.letter)) for sample in samples]
        return RewardResult(values, ["unreadable" if math.isnan(value) else "ok" for value in values])

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        largest = {f"most_{name}": max(result.value) for name, result in scores.results.items()}
        return largest | {"ends": float(iteration_ends), "samples": len(samples)}


def test_the_total_is_weighted_and_a_watched_reward_may_fail() -> None:
    scores = Scorer([Count("a"), Count("b", weight=-0.5)])(samples_of("aab", "b", "?"))
    assert scores.total[:2] == [1.5, -0.5] and math.isnan(scores.total[2])
    assert [*scores.weight] == ["a", "b"]
    watched = Scorer([Count("a", weight=0)])(samples_of("aab", "?"))
    assert watched.total == [0, 0] and watched.weight == {}
    assert watched.describe(0) == {"a": (2.0, "ok")}


def test_only_rewards_that_compare_refuse_questions_without_gold_answers() -> None:
    questions = [Question("a", "1", "rows:1"), Question("b", " ", "rows:2")]
    comparing = Odd(RewardResult([]), name="b")
    scorer = Scorer([Count("a"), Product(Odd(RewardResult([])), comparing)])
    scorer.read_questions(questions)
    comparing.needs_answers = True
    scorer.read_questions(questions[:1])
    with pytest.raises(
        UsageError, match=r"rows:2: no gold answer, as in 1 of 2 questions, and the reward b .*data.task"
    ):
        scorer.read_questions(questions)


class Odd(Reward):
    """Returns what it is made with."""

    def __init__(self, returned: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.returned = returned

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ([1.0], "Odd.score returned [1.0] (list); return a RewardResult"),
        (None, "Odd.score returned None (NoneType); return a RewardResult"),
        (RewardResult(["1.0"]), "Odd.score returned '1.0' (str) for a sample; return numbers"),  # type: ignore[list-item]
        (RewardResult([None]), "Odd.score returned None (NoneType) for a sample; return numbers"),  # type: ignore[list-item]
    ],
)
def test_a_message_shows_what_a_reward_returned_and_its_type(returned: Any, shown: str) -> None:
    reward = Odd(returned)
    assert reward(samples_of("a")).status == [Status.ERROR]
    assert reward.tally.examples[Status.ERROR].endswith(f": TypeError: {shown}")
    numbers = RewardResult([np.float32(0.5), torch.tensor(2.0), True, 3])  # type: ignore[list-item]
    assert Odd(numbers)(samples_of(*"abcd")).status == ["ok"] * 4


def test_the_first_reward_decides_what_is_right_or_the_one_that_is_named() -> None:
    rewards = [Count("a"), Count("b")]
    for scorer, name in ((Scorer(rewards), "a"), (Scorer(rewards, correct="b"), "b")):
        scores = scorer(samples_of("aab"))
        both = Scores.concat([scores, scorer(samples_of("bbb"))])
        assert scorer.main.name == name
        assert scores.main.value == [{"a": 2.0, "b": 1.0}[name]]
        assert both.main.value == [{"a": 2.0, "b": 1.0}[name], {"a": 0.0, "b": 3.0}[name]]


def test_a_name_that_no_reward_has_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match=r"model\.validation\.correct=c: no reward has this name; give one of a, b"):
        Scorer([Count("a"), Count("b")], correct="c")
    needy = Count("b")
    needy.needs = {"grader": "c"}
    with pytest.raises(UsageError, match=r"grader=c of b: no other reward has this name; give one of a, or a reward"):
        Scorer([Count("a"), needy])


def test_rewards_learn_from_all_scores_and_their_metrics_have_full_names() -> None:
    scorer = Scorer([Count("a"), Count("b", weight=0)])
    explored = samples_of("aab", "b")
    found = scorer.learn(explored, scorer(explored), iteration_ends=True)
    expected = {"most_a": 2.0, "most_b": 1.0, "ends": 1.0, "samples": 2}
    assert found == {f"reward/{name}/{key}": value for name in "ab" for key, value in expected.items()}
