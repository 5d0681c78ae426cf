"""The repetition penalty."""

import pytest
from helpers.tiny import prompts_of

from grpo_lightning.rewards.repetition import RepetitionPenalty
from grpo_lightning.types import FinishReason, Sample, UsageError


@pytest.mark.parametrize(
    ("token_ids", "ngram", "expected"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 2, 1, 2, 1], 2, -0.5),  # 12 21 12 21: two of four
        ([7, 7, 7, 7, 7], 2, -0.75),  # 77 four times
        ([7, 7, 7, 7, 7], 1, -0.8),
        ([1, 2, 3, 1, 2, 3], 3, -0.25),  # 123 231 312 123
        ([1, 2, 3], 3, 0.0),  # one of its kind
        ([1, 2, 3], 4, 0.0),  # none
    ],
)
def test_share_of_repeated_ngrams(token_ids, ngram, expected):
    result = RepetitionPenalty(ngram)([Sample(prompts_of([3])[0], "", token_ids, FinishReason.STOP)])
    assert result.value == [pytest.approx(expected)]
    assert result.status == ["ok"]


def test_a_length_below_1_is_refused():
    with pytest.raises(UsageError, match="ngram=0"):
        RepetitionPenalty(0)
