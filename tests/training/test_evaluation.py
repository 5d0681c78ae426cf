"""`Evaluation` alone, and the reward that decides what is right."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.fitting import Digits, fit, scalars
from helpers.tiny import policy_of, prompts_of

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.scripted import ScriptedEngine
from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.training.data import PromptBatch
from grpo_lightning.training.evaluation import Answer, Evaluation
from grpo_lightning.training.explorer import Explorer
from grpo_lightning.types import Completion, FinishReason, Sample, UsageError


class Short(Reward):
    """1 for completions of at most three characters."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([float(len(sample.text) <= 3) for sample in samples], ["ok"] * len(samples))


def evaluation(*texts: str, rewards: Sequence[Reward], correct: str | None = None) -> Evaluation:
    """Of `len(texts)` completions of each prompt; the first is the greedy one too."""
    explorer = Explorer(ScriptedEngine(lambda request, text: texts[request.sample]), Scorer(rewards, correct=correct))
    return Evaluation(explorer, Sampling(max_new_tokens=12), len(texts))


def computed(evaluation: Evaluation) -> dict[str, float]:
    return {name: float(metric.compute()) for name, metric in evaluation.metrics.items()}  # type: ignore[operator]


def test_padding_prompts_do_not_count() -> None:
    found = evaluation("42", "xx", rewards=[Digits()])
    found.update(policy_of(), PromptBatch(prompts_of([3, 4, 5]), num_real=2))
    expected = {"pass@1": 1, "avg@2": 0.5, "pass@2": 1, "maj@2": 1, "reward": 0.5, "length": 3, "truncated": 0}
    assert computed(found) == expected
    assert found.metrics["reward"].weight == 2
    found.reset()
    assert found.metrics["reward"].weight == 0


def test_another_reward_than_the_first_may_decide_what_is_right() -> None:
    rewards = [Digits(), Short(weight=0)]
    texts = ("abcd", "7777", "abcdef", "12")
    first = evaluation(*texts, rewards=rewards)
    second = evaluation(*texts, rewards=rewards, correct="short")
    for found in (first, second):
        found.update(policy_of(), PromptBatch(prompts_of([3]), num_real=1))
    assert (computed(first)["avg@4"], computed(second)["avg@4"]) == (0.5, 0.25)
    # The weighted sum stays what it is, and only `Digits` finds answers to vote on.
    assert computed(first)["reward"] == computed(second)["reward"] == 0.5
    assert "maj@4" in first.metrics and "maj@4" not in second.metrics


def test_predictions_are_those_of_real_prompts() -> None:
    found = evaluation("42", "xx", rewards=[Digits()])
    records = found.predict(policy_of(), PromptBatch(prompts_of([3, 4]), num_real=1))
    assert [(record["completion"], record["reward"]) for record in records] == [("42", 1.0), ("xx", 0.0)]


def test_statistics_of_a_run_are_by_the_reward_that_is_named(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request, text: ("777777", "ab", "abcdef", "12")[request.sample])
    rewards = [Digits(), Short(weight=0)]
    trainer = {"max_epochs": 1}
    fit(tmp_path / "first", engine=engine, rewards=rewards, trainer=trainer)
    fit(tmp_path / "second", engine=engine, rewards=rewards, trainer=trainer, correct="short")
    lengths = [
        [scalars(tmp_path / name)[f"rollout/length_{kind}"][0] for kind in ("right", "wrong")]
        for name in ("first", "second")
    ]
    # With the stop token: 777777 and 12 are digits; ab and 12 are short.
    assert lengths == [[5, 5], [3, 7]]


def test_an_unknown_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model.correct=wright: .*digits"):
        fit(tmp_path, correct="wright")


@pytest.mark.parametrize(("best", "drawn"), [(1.0, 0.0), (0.0, 1.0)])
def test_with_one_completion_the_greedy_answer_is_pass_at_1(best: float, drawn: float) -> None:
    found = evaluation("?", rewards=[Digits()])

    def answer(policy: Any, prompts: Any, count: int, greedy: bool, scoring: Any) -> Any:
        text = "7" if (best if greedy else drawn) else "x"
        sample = Sample(prompts[0], text, [1], FinishReason.STOP)
        return [Answer(Completion([1], None, FinishReason.STOP), sample, greedy, version=0)]

    found.answer = answer  # type: ignore[method-assign]
    found.update(policy_of(), PromptBatch(prompts_of([3]), num_real=1))
    assert (computed(found)["pass@1"], computed(found)["avg@1"]) == (best, drawn)
