"""The cosine reward of experiments/sick_runs, whose verifier is a part like those of the gated reward."""

import math

import pytest
import torch
from helpers.fitting import Exact
from helpers.tiny import prompts_of

from experiments.sick_runs.cosine_length import CosineLength
from grpo_lightning import FinishReason, Run, Sample


def sample(length: int, text: str, truncated: bool = False) -> Sample:
    """Its gold answer is 1."""
    return Sample(prompts_of([3])[0], text, [7] * length, FinishReason.LENGTH if truncated else FinishReason.STOP)


def test_the_cosine_of_the_experiment_has_the_values_of_the_paper():
    reward = CosineLength(Exact(), right_short=2, right_long=1, wrong_short=-10, wrong_long=0, truncated=-10)
    reward.setup(Run(torch.device("cpu"), tokenizer=None, max_new_tokens=20))
    result = reward([sample(5, "#### 1"), sample(10, "#### 2"), sample(30, "?"), sample(30, "?", truncated=True)])
    assert result.value == [pytest.approx(1 + (1 + math.sqrt(0.5)) / 2), pytest.approx(-5), 0, -10]  # cos(π/4)
    assert result.status == ["ok", "ok", "no_answer", "no_answer"]
