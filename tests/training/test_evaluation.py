"""`Evaluation` alone, and the reward that decides what is right."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contracts import needs
from helpers.fitting import Digits, EarlyDigits, Echo, Product, fit, scalars
from helpers.tiny import policy_of, prompts_of

from grpo_lightning import Explorer, FormatReward, RewardResult, Sampling, Scorer
from grpo_lightning.command.overview import optional
from grpo_lightning.maths.metrics import clustered_half_width
from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.rewards.reward import Reward, RewardFailure
from grpo_lightning.training.evaluation import Answer, Evaluation, Validation, grader_class, same_grader
from grpo_lightning.training.question_values import QuestionValues
from grpo_lightning.training.task_data import PromptBatch, TaskData
from grpo_lightning.types import FinishReason, Sample, UsageError

ScriptedEngine: Any = optional("ScriptedEngine")
pytestmark = needs(ScriptedEngine)


class Short(Reward):
    """1 for completions of at most three characters."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([float(len(sample.text) <= 3) for sample in samples], ["ok"] * len(samples))


def evaluation(*texts: str, rewards: Sequence[Reward], correct: str | None = None) -> Evaluation:
    """Of `len(texts)` completions of each prompt; the first is the greedy one too."""
    explorer = Explorer(ScriptedEngine(lambda request, text: texts[request.sample]), Scorer(rewards, correct=correct))
    return Evaluation(explorer, Sampling(max_new_tokens=12), len(texts))


def computed(evaluation: Evaluation) -> dict[str, float]:
    return {name: float(metric.compute()) for name, metric in evaluation.metrics.items()}


def test_padding_prompts_do_not_count() -> None:
    found = evaluation("42", "xx", rewards=[Digits()])
    found.update(policy_of(), PromptBatch(prompts_of([3, 4, 5]), num_real=2))
    expected = {"greedy": 1, "avg@2": 0.5, "pass@2": 1, "maj@2": 1, "reward": 0.5, "length": 3, "truncated": 0}
    expected |= {"failed": 0, "ci95": 0}
    assert computed(found) == expected
    assert found.values()["reward"] == [0.5, 0.5]
    found.reset()
    assert found.metrics["reward"].rows_and_values == [] and not found.was_asked


class EarlyCounted(EarlyDigits):
    """Counts the samples that it is given, and fails on those of one prompt."""

    def __init__(self, failing_id: int) -> None:
        super().__init__()
        self.failing_id, self.prompt_ids = failing_id, list[int]()

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        self.prompt_ids += [sample.prompt.id for sample in samples]
        result = super().score(samples)
        is_failing = [sample.prompt.id == self.failing_id for sample in samples]
        result.value = [math.nan if fails else value for fails, value in zip(is_failing, result.value, strict=True)]
        return result


@pytest.mark.parametrize("num_real", [0, 1, 2])
def test_padding_prompts_are_answered_and_not_scored(num_real: int) -> None:
    reward = EarlyCounted(failing_id=30)
    found = evaluation("42", "xx", rewards=[reward])
    asked: list[int] = []
    engine = found.explorer.engine
    answered = engine.generate

    def generate(requests: Any, *args: Any) -> Any:
        asked.append(len(requests))
        return answered(requests, *args)

    engine.generate = generate  # type: ignore[method-assign]
    batch = PromptBatch(prompts_of([3, 4, 5]), num_real)
    found.update(policy_of(), batch)
    assert len(found.predict(policy_of(), batch)) == 2 * num_real
    assert asked == [3, 6, 6]  # as on the other ranks
    assert sorted(reward.prompt_ids) == sorted([10, 20][:num_real] * 5)
    found.scorer.stop_if_broken("validation")
    assert reward.tally.num_samples == 0


def states_of(metric: Any) -> list[torch.Tensor]:
    states = metric.metric_state.values()
    return [tensor for state in states for tensor in (state if isinstance(state, list) else [state])]


def test_metrics_stay_on_the_cpu_and_add_up_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = evaluation("42", "xx", rewards=[Digits()]).to("meta")  # as Lightning moves the module to its device
    found.update(policy_of(), PromptBatch(prompts_of([3, 4]), num_real=2))
    assert {state.device.type for metric in found.metrics.values() for state in states_of(metric)} == {"cpu"}

    def of_two_ranks(values: list[Any], value: Any) -> None:
        values[:] = [value, 2 * value]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", of_two_ranks)
    assert computed(found)["length"] == 4.5  # 3 and 3 here, 6 and 6 there
    assert computed(found)["ci95"] == pytest.approx(clustered_half_width([0.5, 1, 0.5, 1]))
    assert found.values()["length"] == [3, 3, 6, 6]  # by rows, which are doubled there too


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


@pytest.mark.parametrize(("best", "drawn"), [(1.0, 0.0), (0.0, 1.0)])
def test_with_one_completion_avg_at_1_is_the_sampled_one(best: float, drawn: float) -> None:
    found = evaluation("?", rewards=[Digits()])

    def answer(policy: Any, prompts: Any, count: int, greedy: bool, scoring: Any) -> Any:
        text = "7" if (best if greedy else drawn) else "x"
        sample = Sample(prompts[0], text, [1], FinishReason.STOP)
        return [Answer(sample, greedy, version=0)]

    found.answer = answer  # type: ignore[method-assign]
    found.update(policy_of(), PromptBatch(prompts_of([3]), num_real=1))
    assert (computed(found)["greedy"], computed(found)["avg@1"]) == (best, drawn)
    assert "pass@1" not in found.metrics  # it would be avg@1


class Counted(Digits):
    """Fails on texts with an x; counts the samples that it is given."""

    def __init__(self, pattern: str = "x", weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.pattern, self.num_graded = pattern, [0]

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        self.num_graded[0] += len(samples)
        result = super().score(samples)
        result.value = [math.nan if self.pattern in s.text else v for s, v in zip(samples, result.value, strict=True)]
        return result


def test_a_completion_that_was_not_graded_is_no_wrong_answer() -> None:
    found = evaluation("42", "x", "x", rewards=[Counted()])
    found.update(policy_of(), PromptBatch(prompts_of([3]), num_real=1))
    values = computed(found)
    assert values["failed"] == 0.5  # two of three drawn and the greedy one
    assert [values[name] for name in ("greedy", "avg@3", "pass@3", "maj@3")] == [1, 1, 1, 1]
    found = evaluation("x", "x", rewards=[Counted()])
    found.update(policy_of(), PromptBatch(prompts_of([3]), num_real=1))
    assert all(math.isnan(computed(found)[name]) for name in ("greedy", "avg@2", "pass@2", "maj@2", "reward"))
    assert computed(found)["failed"] == 1


@pytest.mark.parametrize(("pattern", "by_grader"), [("x", 0), ("y", 3)])
def test_a_reward_with_equal_arguments_becomes_the_grader(pattern: str, by_grader: int) -> None:
    trained, grader = Counted(weight=0.5), Counted(pattern, name="other")
    found = evaluation("4", "5", rewards=[Digits(), trained])
    found.set_grader(grader)
    found.update(policy_of(), PromptBatch(prompts_of([3]), num_real=1))
    assert trained.num_graded == [3] and grader.num_graded == [by_grader]
    assert (found.grader is trained) == (pattern == "x")
    found.set_grader(None)
    assert found.grader is found.scorer.rewards[0]


@pytest.mark.parametrize(
    ("reward", "grader", "is_same"),
    [
        (lambda: FunctionReward("a.b", weight=0, num_workers=1), lambda: FunctionReward("a.b", name="c"), True),
        (lambda: FunctionReward("a.b", timeout=5), lambda: FunctionReward("a.b"), False),
        (FormatReward, lambda: FunctionReward("a.b"), False),
        (lambda: FormatReward("a"), FormatReward, False),
        (lambda: FunctionReward("a.b"), lambda: FunctionReward("a.c"), False),
        (lambda: Product(Digits(), Digits()), lambda: Product(Digits(), Digits()), False),  # nothing to be sure of
    ],
)
def test_which_rewards_are_the_same_grader(reward: Any, grader: Any, is_same: bool) -> None:
    assert same_grader(reward(), grader()) == same_grader(grader(), reward()) == is_same


class Graded(Echo):
    """Questions with a grader."""

    grader = "training.test_evaluation.Short"


def test_nothing_is_learned_from_the_grader(tmp_path: Path) -> None:
    runs = {}
    for name, task in (("without", Echo()), ("with", Graded())):
        data = TaskData(task, val_batch_size=5)
        module = fit(tmp_path / name, trainer={"limit_val_batches": 1, "max_epochs": 1}, data=data)
        runs[name] = scalars(tmp_path / name), module.policy.state_dict()
    (plain, weights), (graded, graded_weights) = runs["without"], runs["with"]
    assert all(torch.equal(weights[key], graded_weights[key]) for key in weights)
    changed = {name for name in plain | graded if plain.get(name) != graded.get(name)}
    of_validation = {"val/avg@2", "val/greedy", "val/pass@2", "val/maj@2", "val/ci95"}
    of_training = {"rollout/length_right", "rollout/length_wrong", "rollout/right_and_finished"}
    assert changed == of_validation | of_training | {f"reward/short/{name}" for name in ("mean", "std", "ok")}


@pytest.mark.parametrize("grader", [None, Counted("")])
def test_a_validation_that_cannot_be_graded_ends_the_run(grader: Reward | None, tmp_path: Path) -> None:
    rewards = [Digits()] if grader else [Counted("")]
    validation = Validation(grader)
    with pytest.raises(RewardFailure, match=r"reward counted failed on 72 of 72 .*max_failed_rewards=0.5 of a validat"):
        fit(tmp_path, rewards=rewards, validation=validation, trainer={"limit_val_batches": 1.0})
    assert not scalars(tmp_path).get("reward/mean")  # before the first step


@pytest.mark.parametrize("name", ["NoSuchReward", "no_such_module.Grader"])
def test_a_missing_grader_is_one_message(name: str) -> None:
    with pytest.raises(UsageError, match=f"model.validation.grader={name}.* name another"):
        grader_class(name)


@pytest.mark.parametrize("mean", [0.0, 1e4, 1e8])
def test_the_interval_does_not_depend_on_where_the_mean_is(mean: float) -> None:
    values = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    metric = QuestionValues(clustered_half_width)
    metric.update(range(500), (values + mean).tolist())
    metric.update([500], [math.nan])  # a question that was not graded
    assert float(metric.compute()) == pytest.approx(1.96473 * float(values.std()) / 500**0.5, rel=1e-4)
