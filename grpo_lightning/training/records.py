"""Completions as JSON-ready records: what predictions.jsonl and completions.jsonl hold."""

import math
from typing import Any

from grpo_lightning.rewards.results import Scores
from grpo_lightning.types import Sample


def record(sample: Sample, scores: Scores, row: int) -> dict[str, Any]:
    """A completion with its question, its reward, and the value and status of every part of it.

    Args:
        sample: The completion.
        scores: Those of all completions.
        row: The completion's row in them.
    """
    parts = scores.describe(row)
    return {
        "source": sample.prompt.question.source,
        "question": sample.prompt.question.text,
        "answer": sample.answer,
        "completion": sample.text,
        "finish_reason": str(sample.finish_reason),
        "reward": none_if_nan(scores.total[row]),
        "scores": {name: none_if_nan(value) for name, (value, _) in parts.items()},
        "statuses": {name: status for name, (_, status) in parts.items()},
    }


def none_if_nan(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value
