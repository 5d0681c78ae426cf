"""Failures of rewards: one line per step with a count, and one decision per step."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.fitting import Digits, Echo, Product, fit
from helpers.tiny import prompts_of
from torch import Tensor

from grpo_lightning import DynamicSampling, GroupFilter, Reward, RewardFailure, Scorer
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.tasks.orders import Shuffled
from grpo_lightning.types import FinishReason, Question, Sample


def sample(text: str = "a") -> Sample:
    prompt = prompts_of([3])[0]
    prompt.question = Question("q", "1", source="rows.jsonl:7")
    return Sample(prompt, text, [7, 7], FinishReason.STOP)


class Fails(Reward):
    """Raises, or returns something bad, on texts that say so."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        if any(s.text == "raise" for s in samples):
            raise KeyError("gone")
        values = {"nan": math.nan, "inf": math.inf}
        return RewardResult([values.get(s.text, 1.0) for s in samples], ["ok"] * len(samples))


class Short(Reward):
    """Returns too few values."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([], [])


def test_one_line_per_step_not_per_sample(caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scorer([Fails(name="mine"), Short()], max_failed=1)
    for _ in range(3):
        scorer([sample("raise")] * 20 + [sample("nan"), sample("inf"), sample("good")])
        scorer([sample("raise")] * 9)
        scorer.stop_if_broken()
    assert len(caplog.messages) == 2 * 3
    assert caplog.messages[0] == (
        "reward mine failed on 31 of 32 samples (error: 29, not_finite: 2), for example on a sample of rows.jsonl:7, "
        "'raise': KeyError: 'gone'"
    )
    assert "reward short failed on 32 of 32 samples (error: 32)" in caplog.messages[1]
    assert "returned 0 values and 0 statuses for 1 samples" in caplog.messages[1]
    assert caplog.messages[2:4] == caplog.messages[:2]


@pytest.mark.parametrize(
    "around", [lambda inner: Product(inner, Fails(name="b")), lambda inner: Product(Fails(name="b"), inner)]
)
def test_a_reward_inside_another_tells_its_own_failures(around: Any, caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scorer([around(Fails(name="inner"))], max_failed=1)
    scorer([sample("raise"), sample("good")])
    scorer.stop_if_broken()
    inner = next(message for message in caplog.messages if message.startswith("reward inner"))
    assert "failed on 1 of 2 samples (error: 1)" in inner and "KeyError: 'gone'" in inner


class Wraps(Reward):
    """Fails on its own account, after the reward inside it was asked."""

    def __init__(self, inner: Reward) -> None:
        super().__init__()
        self.parts = (inner,)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        result = self.parts[0](samples)
        if len(samples) > 1:
            raise RuntimeError("try one by one")
        return result


def test_samples_that_are_tried_again_count_once() -> None:
    inner = Fails()
    reward = Wraps(inner)
    reward([sample("raise"), sample("good"), sample("good")])
    assert reward.tally.statuses == inner.tally.statuses == Counter(ok=2, error=1)


def test_max_failed_is_a_fraction_of_the_step_not_of_a_round() -> None:
    scorer = Scorer([Fails()], max_failed=0.25)
    scorer([sample("raise")] * 2)
    scorer([sample("good")] * 6)
    scorer.stop_if_broken()
    scorer([sample("raise")] * 3)
    scorer([sample("good")] * 5)
    with pytest.raises(RewardFailure, match=r"fails failed on 3 of 8 samples \(error: 3\).*max_failed_rewards=0.25"):
        scorer.stop_if_broken()


class OneBadQuestion(Digits):
    """Fails on every completion of one question."""

    def __init__(self, source: str) -> None:
        super().__init__(name="digits")
        self.source = source
        self.calls: list[Counter[str]] = []

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        self.calls.append(Counter(s.prompt.question.source for s in samples))
        if any(s.prompt.question.source == self.source for s in samples):
            raise ValueError("a bad row")
        return super().score(samples)


class AllButTheFirst(GroupFilter):
    """Lets all prompts of a round but one pass, so that every step has a second round of a single prompt."""

    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        passes = reward.new_ones(num_groups).bool()
        passes[0] = num_groups == 1
        return passes


def test_one_bad_question_does_not_end_a_run_with_dynamic_sampling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order, questions = Shuffled(), Echo().questions("train")
    order.setup(questions, seed=0)
    alone = questions[
        order.next(range(4, 5))[0]
    ].source  # all of the second round: every sample of it fails, and 4 of the step's 20
    reward = OneBadQuestion(alone)
    loop = {"dynamic_sampling": DynamicSampling(filter=AllButTheFirst())}
    fit(tmp_path, rewards=[reward], loop=loop, trainer={"max_epochs": 2})
    assert Counter({alone: 4}) in reward.calls
    failures = [message for message in caplog.messages if "failed on" in message]
    assert len(failures) == 1
    assert f"digits failed on 4 of 20 samples (error: 4), for example on a sample of {alone}" in failures[0]
