"""LabelledGroup completions to test reward models with."""

from collections.abc import Sequence

from grpo_lightning.plugins.learned.labelled import LabelledGroup


def group(prompt: str, *labels: float, completions: Sequence[str] = ()) -> LabelledGroup:
    """One prompt with as many completions as labels."""
    texts = list(completions) or [f"{prompt}{row}" for row in range(len(labels))]
    return LabelledGroup(prompt, texts, [True] * len(labels), list(labels))
