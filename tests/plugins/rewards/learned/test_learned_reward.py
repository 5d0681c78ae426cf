"""The learned reward: what it remembers, when it learns, and that it goes on exactly."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fitting import Digits, checkpoint_of, resumes_exactly
from helpers.learning import EndsInLetter, explored, group, learn, reward_of, sample, save_policy, scores_of
from helpers.tiny import tokenizer

from grpo_lightning import LearnedReward, RewardResult, RewardUpdate, Scorer
from grpo_lightning.rewards.reward import RewardFailure
from grpo_lightning.types import Sample, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_policy(tmp_path / "policy")


def hashed(id: int) -> float:
    """The number that decides whether the prompt of this id is held out."""
    return group(f"q{id}", 1).hashed


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


def test_it_learns_what_the_verifier_says(folder: Path):
    reward = reward_of(folder)
    before = reward([sample(0, "a"), sample(0, "4")])
    assert before.value == [0.5, 0.5] and before.status == ["ok", "ok"]
    metrics = learn(reward, range(6))
    assert [reward.iterations.version, reward.iterations.iteration] == [metrics[-1]["version"], 3]
    right, wrong = reward([sample(99, "2c"), sample(99, "77")]).value
    assert right > 0.8 and wrong < 0.2
    assert metrics[0]["pairwise"] == 0.5 and metrics[-1]["pairwise"] == 1.0
    assert metrics[0]["verified"] == pytest.approx(sum(s.text[-1].isalpha() for s in explored(0)) / 36)
    assert metrics[0]["overrated"] == pytest.approx(0.5 - metrics[0]["verified"])
    assert "accepted" not in metrics[0] and metrics[1]["accepted"] == 1


def test_it_remembers_right_and_wrong_completions_of_each_prompt(folder: Path):
    reward = reward_of(folder, per_label=1, num_passes=0)
    learn(reward, range(4))
    held_out = {f"q{id}" for id in range(48) if hashed(id) < 0.25}
    assert {g.prompt for g in reward.iterations.test} == held_out
    assert {g.prompt for g in reward.iterations.history} == {f"q{id}" for id in range(48)} - held_out
    assert {iteration for iteration, _ in reward.iterations.history.strata} == {1, 2}
    by_prompt = {g.prompt: g for g in [*reward.iterations.history, *reward.iterations.test]}
    assert by_prompt["q0"].completions == ["a1b", "77"] and by_prompt["q0"].labels == [1, 0]
    assert by_prompt["q1"].completions == ["5e"]


def test_a_label_that_failed_is_none(folder: Path):
    reward = reward_of(folder, num_passes=0)
    samples = [sample(0, text, ended=text != "cut7") for text in ("a", "x1", "y1", "2", "cut7")]
    metrics = reward.learn(samples, scores_of(reward, samples), iteration_ends=True)
    assert metrics["verified"] == pytest.approx(1 / 3)
    remembered = [*reward.iterations.history, *reward.iterations.test]
    assert [g.completions for g in remembered] == [["a", "2", "cut7"]]
    assert remembered[0].ended == [True, True, False]


class Broken(EndsInLetter):
    """It finds itself broken."""

    def stop_if_broken(self, statuses: Counter[str]) -> None:
        raise RewardFailure(f"{statuses['timeout']} timeouts")


def test_a_verifier_that_is_broken_stops_the_run(folder: Path):
    reward = reward_of(folder, grader=Broken())
    samples = [sample(0, text) for text in ("a", "y1", "y2")]
    with pytest.raises(RewardFailure, match="2 timeouts"):
        reward.learn(samples, scores_of(reward, samples), iteration_ends=False)


def samples_of_a_step() -> list[Sample]:
    return [sample(id, text) for id, text in ((1, "a"), (2, "7"), (1, "x1"), (2, "b"))]


def test_a_labeller_of_the_list_grades_every_completion_once(folder: Path):
    """Named it labels as it does inside the learned reward, and scores no sample a second time."""
    counted = Counting(weight=0)
    named = reward_of(folder, grader="counting", num_passes=0)
    scorer = Scorer([named, counted])  # the order of the list does not matter
    scores = scorer(samples_of_a_step())
    metrics = scorer.learn(samples_of_a_step(), scores, iteration_ends=True)
    assert counted.num_scored == 4
    own = reward_of(folder, num_passes=0)
    expected = own.learn(samples_of_a_step(), scores_of(own, samples_of_a_step()), iteration_ends=True)
    assert metrics == {f"reward/learned_reward/{key}": value for key, value in expected.items()}
    assert metrics["reward/learned_reward/verified"] == pytest.approx(2 / 3)
    assert same(named.state_dict(), own.state_dict())


class Counting(EndsInLetter):
    """Counts the samples that it scores."""

    num_scored = 0

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        self.num_scored += len(samples)
        return super().score(samples)


@pytest.mark.parametrize("name", ["math_verifer", "learned_reward"])
def test_an_unknown_grader_is_refused_with_the_names_there_are(name: str):
    rewards = [EndsInLetter(), Digits(), LearnedReward("somewhere", grader=name)]
    message = f"grader={name} of learned_reward: no other reward has this name; give one of ends_in_letter, digits,"
    with pytest.raises(UsageError, match=message):
        Scorer(rewards)
    with pytest.raises(UsageError, match="no other reward has this name; give a reward"):
        Scorer(rewards[2:])


def test_without_passes_it_is_frozen_and_measured(folder: Path):
    reward = reward_of(folder, num_passes=0)
    before = {name: value.clone() for name, value in reward.model.model.state_dict().items()}
    metrics = learn(reward, range(2))
    assert same(before, reward.model.model.state_dict())
    assert metrics[1]["accepted"] == metrics[1]["version"] == metrics[1]["forgetting"] == 0
    assert metrics[1]["pairwise"] == 0.5


def test_forgetting_and_the_bound(folder: Path, caplog: pytest.LogCaptureFixture):
    """The second iteration teaches the contrary of the first: forgetting without a bound, undone with one."""
    with caplog.at_level(logging.INFO):
        for bound, replay, accepted in ((1.0, 0.0, 1.0), (0.02, 0.0, 0.0)):
            reward = reward_of(folder, max_forgetting=bound, fraction=replay)
            first = learn(reward, range(2))[-1]
            assert isinstance(reward.grader, EndsInLetter)
            reward.grader = Contrary()
            second = learn(reward, range(2, 4))[-1]
            assert first["forgetting"] == 0 and second["accepted"] == accepted
            assert (second["forgetting"] > 0.5) == bool(accepted)
            assert reward.iterations.version == 1 + accepted
    assert "accepted as version 2" in caplog.text and "undone, version 1 stays" in caplog.text


class Contrary(EndsInLetter):
    def score(self, samples):
        result = super().score(samples)
        return RewardResult([1 - value for value in result.value], result.status)


def test_what_is_held_out_is_never_trained_on(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    """Iterations of 2, 2 and 8 prompts; only q1 and q9 are held out, so the first two wait for the third."""
    trained: list[set[str]] = []
    original = RewardUpdate.train

    def train(self: RewardUpdate, model: Any, batches: Any) -> float:
        trained.append({g.prompt for batch, _ in batches for g in batch})
        return original(self, model, batches)

    monkeypatch.setattr(RewardUpdate, "train", train)
    held_out = [f"q{id}" for id in sorted(range(12), key=hashed)[:2]]
    others = [id for id in range(12) if f"q{id}" not in held_out]
    last = [int(prompt[1:]) for prompt in held_out]
    reward = reward_of(folder, held_out=hashed(last[1]) + 1e-6)
    for ids in (others[:2], others[2:4], [*others[4:], *last], others + last):
        samples = [sample(id, text) for id in ids for text in ("1a", "27")]
        metrics = reward.learn(samples, scores_of(reward, samples), iteration_ends=True)
        iterations = reward.iterations
        remembered = {g.prompt for g in [*iterations.history, *iterations.test, *iterations.pending]}
        assert {f"q{id}" for id in ids} <= remembered
    assert trained == [{f"q{id}" for id in others}] * 2
    assert {g.prompt for g in reward.iterations.test} == set(held_out)
    assert metrics["version"] == reward.iterations.version and reward.iterations.iteration == 4
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    waiting = [record.getMessage() for record in warnings if record.name.startswith("grpo_lightning")]
    assert len(waiting) == 2 and "2 prompts none is held" in waiting[0] and "4 prompts none is held" in waiting[1]


def a_third(sample: Sample, share: float) -> float:
    """Right are those with a third of digits."""
    return float(share > 0.3)


def test_a_resumed_run_has_the_same_reward_model(folder: Path):
    made: list[LearnedReward] = []

    def options() -> dict[str, Any]:
        made.append(reward_of(folder, grader=Digits(change=a_third), held_out=0.6))
        loop = {"steps_per_iteration": 2, "prompts_per_step": 8}
        return {"loop": loop, "rewards": [Digits(weight=0, change=a_third), made[-1]]}

    resumes_exactly(folder.parent, options, steps=4, cut=3)  # in the middle of the second iteration
    whole, _, resumed = made
    assert whole.iterations.iteration == 2
    assert same(resumed.state_dict(), whole.state_dict())
    saved = [checkpoint_of(folder.parent / where)["rewards"] for where in ("whole", "cut")]
    assert same(*saved) and saved[0].keys() == {"learned_reward"}


def test_the_question_in_its_own_chat_template(folder: Path):
    spell = tokenizer()
    spell.chat_template = (
        "{% for m in messages %}<sep>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bos>{% endif %}"
    )
    spell.save_pretrained(folder)
    reward = reward_of(folder, chat=True, num_passes=0)
    reward.read_questions([])
    learn(reward, [1])
    prompt = next(iter(reward.iterations.history)).prompt
    assert prompt.startswith("<sep>q") and prompt.endswith("<bos>")
