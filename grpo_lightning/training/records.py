"""Completions as JSON-ready records: the lines of predictions.jsonl and completions.jsonl."""

import math
from typing import Any

from grpo_lightning.rewards.results import Scores
from grpo_lightning.types import Sample


def record(sample: Sample, scores: Scores, row: int) -> dict[str, Any]:
    """A completion with its question, its reward, and the value and status of each of its parts.

    Args:
        sample: The completion.
        scores: The scores of all completions.
        row: The index of the completion in `scores`.
    """
    parts = scores.describe(row)
    talk = sample.conversation
    return {
        "source": sample.prompt.question.source,
        "question": sample.prompt.question.text,
        "answer": sample.answer,
        "answer_prefix": sample.prompt.answer_prefix,
        "completion": sample.text,
        "finish_reason": str(sample.finish_reason),
        "reward": none_if_nan(scores.total[row]),
        "scores": {name: none_if_nan(value) for name, (value, _) in parts.items()},
        "statuses": {name: status for name, (_, status) in parts.items()},
        **({} if talk is None else {"messages": talk.messages, "environment": talk.error or talk.status}),
    }


def none_if_nan(value: float) -> float | None:
    """The value; None for NaN, which JSON lacks."""
    return None if math.isnan(value) else value
