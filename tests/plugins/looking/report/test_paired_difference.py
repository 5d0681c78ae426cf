"""Intervals of differences that are paired by seed and question: by hand, and their coverage."""

import math

import numpy as np
import pytest

from grpo_lightning.plugins.looking.report.arm_comparison import Metric, compare, value_of
from grpo_lightning.plugins.looking.report.paired_difference import paired_half_width, unpaired_half_width
from grpo_lightning.plugins.looking.run_files.run_validations import ValuesByQuestion

T_1, T_2 = 12.706205, 4.302653
"""Student's t at 97.5 % for one and two degrees of freedom, from a table."""


def test_half_widths_by_hand() -> None:
    values = np.array([[1.0, 2.0, 3.0], [2.0, 5.0, 5.0]])
    # Means: seeds 2, 4; questions 1.5, 3.5, 4; all 3. MS_seeds = 3 (1 + 1) / 1 = 6,
    # MS_questions = 2 (2.25 + 0.25 + 1) / 2 = 3.5. The rest, value - seed - question + mean:
    # 0.5, -0.5, 0 and the negative, MS_rest = 1 / 2.
    of_seeds, of_questions = 6 / 6, (3.5 - 0.5) / 6
    expected = (of_seeds * T_1 + of_questions * T_2) / math.sqrt(of_seeds + of_questions)
    base = np.zeros((2, 3))
    assert paired_half_width(values, base) == pytest.approx(expected, rel=1e-5)
    assert unpaired_half_width(values, base) == pytest.approx(expected, rel=1e-5)
    # The same values in both arms: all of it cancels, and nothing does.
    assert paired_half_width(values, values) == 0
    twice = 2 * (of_seeds * T_1 + of_questions * T_2) / math.sqrt(2 * (of_seeds + of_questions))
    assert unpaired_half_width(values, values) == pytest.approx(twice, rel=1e-5)


NUM_SIMULATIONS = 1000


@pytest.mark.parametrize("num_seeds", [3, 5])
@pytest.mark.parametrize(("of_seed", "of_question"), [(0.03, 0.15), (0.06, 0.3), (0.1, 0.1)])
def test_an_interval_covers_what_it_says(num_seeds: int, of_seed: float, of_question: float) -> None:
    """Right answers out of eight, of two arms that share the questions' difficulty and a part of the seeds' effects."""
    random = np.random.default_rng(0)
    covered = narrower = 0
    for _ in range(NUM_SIMULATIONS):
        difficulty = random.normal(0.5, 0.3, 128)
        shared = random.normal(0, of_seed, (num_seeds, 1))
        expected, sampled = [], []
        for effect in (0.0, 0.1):
            own = random.normal(0, of_seed, (num_seeds, 1)) + random.normal(0, of_question, 128)
            expected.append(effect)
            sampled.append(difficulty + shared + own + effect + random.normal(0, 0.12, (num_seeds, 128)))
        half = paired_half_width(sampled[1], sampled[0])
        covered += abs((sampled[1] - sampled[0]).mean() - (expected[1] - expected[0])) <= half
        narrower += half < unpaired_half_width(sampled[1], sampled[0])
    assert 0.93 <= covered / NUM_SIMULATIONS <= 0.97
    assert narrower > 0.6 * NUM_SIMULATIONS


def by_question(values: list[list[float]], grader: str = "MathVerifier", questions: str = "a") -> ValuesByQuestion:
    return ValuesByQuestion(grader, questions, dict(enumerate(values)))


def difference(*arms: list[ValuesByQuestion | None], metric: str = "val/avg@8"):
    """The cell of the second of two arms, whose scalars are the means of the questions."""
    scalars: dict = {}
    questions: dict = {}
    for arm, seeds in zip("ab", arms, strict=True):
        scalars[arm] = {
            str(seed): {"val/avg@8": [(step, float(np.nanmean(row))) for step, row in run.by_step.items()]}
            for seed, run in enumerate(seeds)
        }
        questions[arm] = {str(seed): {"val/avg@8": run} for seed, run in enumerate(seeds)}
    return compare(scalars, [Metric.parse(metric)], questions=questions).cells["b"][0]


BASE = [by_question([[0.1, 0.5], [0.25, 0.5, 1.0][:2]]) for _ in range(3)]


def test_questions_are_paired_in_every_linear_statistic() -> None:
    random = np.random.default_rng(1)
    base, other = random.uniform(size=(2, 3, 4, 6))  # by seed, step and question
    runs = [[by_question(seed.tolist()) for seed in arm] for arm in (base, other)]
    weights = {"last": [0, 0, 0, 1], "last3": [0, 1 / 3, 1 / 3, 1 / 3], "mean": [1 / 6, 1 / 3, 1 / 3, 1 / 6]}
    for name, weight in weights.items():
        found = difference(*runs, metric=f"val/avg@8:{name}").difference
        values = np.einsum("k,askq->asq", weight, np.stack([base, other]))
        assert found.mean == pytest.approx((values[1] - values[0]).mean())
        assert found.half == pytest.approx(paired_half_width(values[1], values[0]))
        assert (found.n, found.num_questions) == (3, 6)


def test_a_question_without_a_grade_does_not_count() -> None:
    base = [by_question([[0.0, 0.5, 1.0]]), by_question([[0.5, 0.5, math.nan]])]
    other = [by_question([[1.0, 0.5, 0.0]]), by_question([[1.0, 1.0, 0.0]])]
    found = difference(base, other).difference
    assert found.mean == pytest.approx((1.0 + 0.0 + 0.5 + 0.5) / 4)
    assert (found.n, found.num_questions) == (2, 2)


def test_what_does_not_compare_has_no_difference() -> None:
    ungraded, moved = difference(BASE, [by_question([[0.1, 0.2]], "my_rewards.brief") for _ in range(3)]), None
    moved = difference(BASE, [by_question([[0.1, 0.2]], questions="b") for _ in range(3)])
    assert (ungraded.difference, ungraded.reason) == (None, "another grader")
    assert (moved.difference, moved.reason) == (None, "other questions")


def test_seeds_with_questions_of_their_own_pair_seeds() -> None:
    """Their means hold the questions' variance already."""
    arms = [
        [by_question([[value, value + 0.1]], questions=str(seed)) for seed, value in enumerate(values)]
        for values in ([0.1, 0.3, 0.2], [0.2, 0.5, 0.5])
    ]
    found = difference(*arms).difference
    assert found.mean == pytest.approx(0.2) and found.half == pytest.approx(T_2 * 0.1 / math.sqrt(3), rel=1e-5)
    assert found.num_questions == 0


def test_a_single_run_whose_questions_are_alike_has_no_interval() -> None:
    for value in (0.5, 7.0):
        cell = difference([by_question([[value] * 4])], [by_question([[value] * 4])])
        assert cell.estimate.mean == value and math.isnan(cell.estimate.half)
        assert value_of(cell) == f"{value:g}"
    # All right: other questions may be wrong.
    assert difference([by_question([[1.0] * 4])], [by_question([[1.0] * 4])]).estimate.half > 0
