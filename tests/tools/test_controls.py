"""The controls."""

import statistics

import pytest

from experiments.controls import LastNumber, RandomReward, last_number
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError


def sample(text: str, prompt: int = 0, answer: str = "1") -> Sample:
    return Sample(Prompt(prompt, "q", [1], Question("q", answer)), text, [7], FinishReason.STOP)


def test_the_random_reward_depends_on_seed_prompt_and_text_alone():
    samples = [sample(f"{row % 9}", prompt=row % 7) for row in range(200)]
    values = RandomReward(seed=3)(samples).value
    assert values == RandomReward(seed=3)(samples).value
    assert values[::-1] == RandomReward(seed=3)(samples[::-1]).value
    assert values != RandomReward(seed=4)(samples).value
    assert values[:63] == values[63:126]  # the same prompts and texts
    assert RandomReward()([sample("a \ud800 b")]).status == ["ok"]


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 1.0])
def test_random_reward_has_its_probability(probability):
    values = RandomReward(probability)([sample(str(text), prompt) for text in range(50) for prompt in range(80)]).value
    assert set(values) <= {0.0, 1.0}
    assert statistics.fmean(values) == pytest.approx(probability, abs=0.03)  # four standard deviations


def test_a_probability_out_of_range():
    with pytest.raises(UsageError, match=r"probability=1\.1"):
        RandomReward(1.1)


LAST_NUMBERS = [
    ("<think>7+5=12</think><answer>1", "1", 1), ("it is 1, or 2", "2", 0), ("2 1", "1", 1), ("1.0.", "1.0", 1),
    ("-1", "-1", 0), ("1,", "1", 1), ("none", None, 0), ("9" * 10**5, "9" * 200, 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "number", "value"), LAST_NUMBERS)
def test_the_last_number_of_a_completion_counts(text, number, value):
    assert last_number(text) == number
    result = LastNumber()([sample(text)])
    assert result.value == [value]
    assert result.status == ["no_answer" if number is None else "ok"]


def test_a_gold_answer_that_is_no_number():
    assert LastNumber()([sample("x 1", answer="x")]).value == [0]
    assert LastNumber()([sample("1,234", answer="1234")]).answer == ["1234"]
