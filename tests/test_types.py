"""`at_least`: the check of a setting's lower bound."""

import math

import pytest

from grpo_lightning.types import UsageError, at_least


def test_a_value_below_the_least_is_the_users_mistake() -> None:
    for value in (1, 1.5, None):
        at_least("loop.mu", value, 1)
    with pytest.raises(UsageError, match=r"^loop.mu=0: give 1 or more$"):
        at_least("loop.mu", 0, 1)
    with pytest.raises(UsageError, match=r"^lr=nan of LearnedReward: give 0 or more$"):
        at_least("lr", math.nan, 0, owner="LearnedReward")
