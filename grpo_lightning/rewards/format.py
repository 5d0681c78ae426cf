"""A reward for completions of the required form."""

import math
import re
from collections.abc import Sequence

from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.sandbox.pool import WorkerPool, inside
from grpo_lightning.types import Sample, Status, UsageError


class FormatReward(Reward):
    """1 if the whole completion has the required form, else 0.

    It teaches the policy to put its answer where the verifier finds it. Alone it teaches form without content: gate it
    by correctness (`Gated`). A `<think>` that ends the prompt counts as the start of the completion.

    Args:
        pattern: Regular expression for the whole completion; `.` matches newlines too. By default the form is
            `<think>...</think><answer>...</answer>`: one of each, and an answer that is not empty.
        timeout: Seconds per completion for the pattern, which runs in a worker process.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics.

    Raises:
        UsageError: `pattern` is not a regular expression.
    """

    scores_early = True

    def __init__(
        self,
        pattern: str = "",  # not None: YAML reads a leading # as a comment, and nothing as null
        timeout: float = 1.0,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        check_pattern(pattern)
        self.pattern = pattern
        self._pool = WorkerPool(num_workers=1, timeout=timeout)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Status `ok` or `no_match`; where the pattern takes too long, NaN and `timeout`."""
        texts = [sample.whole_turn for sample in samples]
        if not self.pattern:
            matches: list[bool | str] = [has_default_form(text) for text in texts]
        else:
            outcomes = self._pool.map(inside("matches.matches"), [[self.pattern, text] for text in texts])
            matches = [outcome.value if outcome.status == Status.OK else outcome.status for outcome in outcomes]
        return RewardResult(
            value=[math.nan if isinstance(match, str) else float(match) for match in matches],
            status=[match if isinstance(match, str) else Status.OK if match else Status.NO_MATCH for match in matches],
        )

    def close(self) -> None:
        """Ends the worker process."""
        self._pool.close()


def has_default_form(text: str) -> bool:
    """Whether `text` is one `<think>` block and one `<answer>` block that is not empty."""
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return False
    before, _, rest = text.partition("<think>")
    _, _, rest = rest.partition("</think>")
    between, _, rest = rest.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    return not (before + between + after).strip() and bool(closed) and bool(answer.strip())


def check_pattern(pattern: str) -> None:
    """Raises UsageError unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UsageError(f"pattern={pattern!r}: not a regular expression: {error}") from error
