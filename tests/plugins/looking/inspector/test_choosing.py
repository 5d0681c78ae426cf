"""Which groups are recorded, by numbers made by hand."""

import math

import pytest
import torch
from helpers.tiny import prompts_of, rollouts_of

from grpo_lightning import Exploration, FinishReason, RewardResult, Sample, Scores
from grpo_lightning.plugins.looking.inspector.candidates import Choice, GroupSummary, summarise

GROUPS = [
    # prompt id, mean, std, push
    GroupSummary(7, 0.5, 0.5, 1.0),
    GroupSummary(3, 0.1, 0.3, 9.0),
    GroupSummary(1, 0.0, 0.0, 0.0),
    GroupSummary(2, 0.0, 0.0, 0.0),
    GroupSummary(9, 0.9, 0.3, 4.0),
    GroupSummary(4, 1.0, 0.0, 0.0),
    GroupSummary(5, math.nan, 0.0, 8.0),
]


def test_one_of_each_role() -> None:
    choice = Choice.from_groups(GROUPS, 4)
    assert choice.role_by_id == {7: "mixed", 1: "worst", 4: "best"}  # 1 before 2: the lower id of equal ones
    assert choice.pushed_ids == [3, 5] and choice.num_moved == 1  # twice as many as there are turns
    assert choice.roles({7: 0.2, 1: 0.0, 4: 0.1, 3: 0.3, 5: 0.5}) == {
        7: ["mixed"],
        5: ["moved"],
        1: ["worst"],
        4: ["best"],
    }
    # The most moved of all is named so, even if another reason took it first.
    assert choice.roles({7: 0.9, 1: 0.0, 4: 0.1, 3: 0.3, 5: 0.3}) == {
        7: ["mixed", "moved"],
        3: ["moved"],
        1: ["worst"],
        4: ["best"],
    }


def test_more_than_four_take_turns_without_doubles() -> None:
    choice = Choice.from_groups(GROUPS, 6)
    assert choice.role_by_id == {7: "mixed", 1: "worst", 4: "best", 3: "mixed"}
    assert choice.num_moved == 2 and choice.pushed_ids == [5, 9, 2]
    movement = dict.fromkeys(choice.prompt_ids, 0.0) | {9: 0.1}
    assert choice.roles(movement) == {7: ["mixed"], 3: ["mixed"], 9: ["moved"], 2: ["moved"], 1: ["worst"], 4: ["best"]}


def test_summary_of_a_group() -> None:
    rollouts = rollouts_of([2, 1, 1], [3, 3], group=[0, 0, 1])
    rollouts.advantage = torch.tensor([1.0, -2.0, 0.5, 1.0])
    rollouts.weight = torch.tensor([0.5, 0.5, 1.0, 0.0])
    rollouts.sampler_logp = torch.tensor([0.25, 0.5, 1.0, 0.5]).log()
    prompts = prompts_of([3, 3])
    samples = [Sample(prompts[group], "", [7], FinishReason.STOP) for group in (0, 0, 1)]
    values = [1.0, 0.0, math.nan]
    scores = Scores(values, {"r": RewardResult(values, ["ok"] * 3)})
    exploration = Exploration(samples, scores, rollouts, {}, 0)
    first, second = summarise(exploration)
    # |weight * advantage| (1 - p): 0.5 * 0.75 + 1 * 0.5 + 0.5 * 0
    assert first == GroupSummary(10, 0.5, 0.5, pytest.approx(0.875))
    assert math.isnan(second.mean) and (second.prompt_id, second.std, second.push) == (20, 0.0, 0.0)
    rollouts.sampler_logp = None
    assert summarise(exploration)[0].push == pytest.approx(0.5 + 1.0 + 0.5)
