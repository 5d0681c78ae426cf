"""Rewards of a whole group: classes, and functions of a prompt's completions."""

import math
from collections.abc import Sequence

import pytest
from helpers.paths import ROOT
from helpers.tiny import prompts_of

from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import GroupReward
from grpo_lightning.types import FinishReason, Prompt, Question, Sample


class LongestWins(GroupReward):
    """1 for the longest completions of a prompt; refuses groups with the word `raise`, miscounts at `short`."""

    def score(self, group: Sequence[Sample]) -> RewardResult:
        texts = [sample.text for sample in group]
        if "raise" in texts:
            raise KeyError("raise")
        most = max(map(len, texts))
        return RewardResult([float(len(text) == most) for text in texts][: 1 if "short" in texts else None])


def of(prompt: int, text: str) -> Sample:
    return Sample(prompts_of([3] * 4)[prompt], text, [7], FinishReason.STOP)


def test_groups_are_scored_apart_and_a_failure_costs_its_group() -> None:
    reward = LongestWins()
    samples = [of(0, "xx"), of(1, "raise"), of(2, "a"), of(0, "x"), of(1, "xxx"), of(2, "short"), of(3, "x")]
    result = reward(samples)
    values = [None if math.isnan(value) else value for value in result.value]
    assert values == [1.0, None, None, 0.0, None, None, 1.0]
    assert result.status == ["ok", "error", "error", "ok", "error", "error", "ok"]
    assert reward.tally.failed == {"error": 4}
    assert "'raise'" in reward.tally.examples["error"]  # of the first of the two groups


GROUP = ["the cat sat", "the cat sat", "7 it is", "it is 7 of course"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Of its words "7 it is" has 3, 3 and 0 of 3 that another lacks; the last has 5, 5 and 2 of 5.
        ("diversity", [2 / 3, 2 / 3, 2 / 3, (1 + 1 + 2 / 5) / 3]),
        ("pairwise", [0.5 / 3, 0.5 / 3, 2.5 / 3, 2.5 / 3]),
        ("rank", [0.0, 0.0, 1.0, 0.5]),
    ],
)
def test_the_examples(name: str, expected: list[float]) -> None:
    reward = FunctionReward(f"{ROOT / 'examples' / 'group_rewards.py'}:{name}", num_workers=1)
    prompt = Prompt(0, "Q", [1], Question("3+4", "7"))
    group = [Sample(prompt, text, [1] * len(text), FinishReason.STOP) for text in GROUP]
    assert reward(group).value == pytest.approx(expected)
    assert reward(group[:1]).status == ["ok"]  # the greedy answer of a validation
    reward.close()


def test_a_function_gets_the_group_whatever_its_argument_is_called(tmp_path) -> None:
    (tmp_path / "counting.py").write_text("def count(answers):\n    return [len(answers)] * len(answers)\n")
    reward = FunctionReward(f"{tmp_path / 'counting.py'}:count", group=True, num_workers=1)
    assert reward([of(0, "a"), of(1, "b"), of(0, "c")]).value == [2.0, 1.0, 2.0]
    assert not reward.scores_early
    reward.close()
