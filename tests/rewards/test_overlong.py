import pytest
from tiny import prompts_of

from grpo_lightning.rewards import OverlongPenalty
from grpo_lightning.types import FinishReason, Sample, UsageError


def penalty(length: int, **kwargs) -> float:
    sample = Sample(prompts_of([3])[0], "", [7] * length, FinishReason.STOP)
    result = OverlongPenalty(**kwargs)([sample])
    assert result.status == ["ok"]
    return result.value[0]


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (30, -1)])
def test_numbers_of_dapos_eq_13(length, expected):
    # L_max 20, L_cache 4: 0 up to 16, then (16 - |o|) / 4, and -1 from 20 on.
    assert penalty(length, max_length=20, cache=4) == expected


@pytest.mark.parametrize("cache", [0, 21])
def test_a_cache_out_of_range_is_refused(cache):
    with pytest.raises(UsageError, match=f"cache={cache}"):
        OverlongPenalty(max_length=20, cache=cache)
