"""Process supervision by hand, and against a loop in float64."""

import math
import random

import pytest
from helpers.reward_batches import batch_of, float64_group_std, per_completion

from grpo_lightning import ProcessSupervision, UsageError


def test_process_supervision_by_hand():
    # Steps worth 2 and 3 in the first completion and 1 in the second: mean 2, std 1, so 0, 1 and -1.
    # A token gets what the steps that end at it or later are worth; the last token of the first is behind them all.
    steps = [[(0, 2.0), (2, 3.0)], [(1, 1.0)]]
    batch = batch_of([[0, 0]], [1], [0, 0], [4, 2], [steps])
    result = ProcessSupervision(advantage_eps=0).per_token(batch)
    assert per_completion(result, [4, 2]) == [[1, 1, 1, 0], [-1, -1]]


def test_process_supervision_needs_segments():
    with pytest.raises(UsageError, match="no reward scores segments"):
        ProcessSupervision().per_token(batch_of([[0, 1]], [1], [0, 0], [2, 2]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_process_supervision_agrees_with_a_float64_loop(seed, std, ddof):
    rng = random.Random(seed)
    count, weights = rng.randrange(1, 12), [1.0, -0.5, 2.0]
    group = [rng.randrange(3) for _ in range(count)]
    lengths = [rng.randrange(1, 7) for _ in range(count)]

    def some_steps() -> list[list[tuple[int, float]]]:
        ends = [sorted(rng.sample(range(n), rng.randrange(0, min(n, 3) + 1))) for n in lengths]
        return [[(e, rng.choice([0.0, 1.0, rng.gauss(0, 2)])) for e in own] for own in ends]

    steps = [some_steps(), None, some_steps()]
    values = [[rng.gauss(0, 1) for _ in range(count)] for _ in weights]
    # A completion is left out where a reward failed, and where one of its steps is NaN.
    values[1] = [math.nan if rng.random() < 0.15 else value for value in values[1]]
    for row in range(count):
        if steps[2][row] and rng.random() < 0.15:
            steps[2][row][0] = (steps[2][row][0][0], math.nan)
    failed = [
        math.isnan(values[1][row]) or any(math.isnan(value) for _, value in steps[2][row]) for row in range(count)
    ]
    expected = [[0.0] * n for n in lengths]
    for k, weight in enumerate(weights):
        of_reward = steps[k] or [[(n - 1, value)] for n, value in zip(lengths, values[k], strict=True)]
        flat = [(row, *step) for row, own in enumerate(of_reward) if not failed[row] for step in own]
        normalised = float64_group_std([value for _, _, value in flat], [group[row] for row, _, _ in flat], ddof)
        for (row, end, _), value in zip(flat, normalised, strict=True):
            for t in range(end + 1):
                expected[row][t] += weight * value
    batch = batch_of(values, weights, group, lengths, steps)
    result = per_completion(ProcessSupervision(std=std).per_token(batch), lengths)
    for row in range(count):
        assert result[row] == pytest.approx(expected[row], rel=1e-5, abs=1e-5)
