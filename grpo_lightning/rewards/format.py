"""A reward for completions of the required form."""

import math
import re
from collections.abc import Sequence

from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.sandbox.pool import WorkerPool, inside
from grpo_lightning.sandbox.worker import Outcome
from grpo_lightning.types import Sample, Status, UsageError

NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
DEFAULT = re.compile(rf"\s*<think>{NO_TAG}</think>\s*<answer>(?!\s*</answer>){NO_TAG}</answer>\s*", re.DOTALL)


class FormatReward(Reward):
    """1 if the whole completion has the required form, else 0.

    It teaches the policy to put its answer where the verifier finds it. Alone it teaches form without content: gate it
    by correctness (`Gated`). A `<think>` that ends the prompt counts as the start of the completion.

    Args:
        pattern: Regular expression for the whole completion; `.` matches newlines too. By default the form is
            `<think>...</think><answer>...</answer>`: each once, and an answer that is not empty.
        timeout: CPU seconds per completion for the pattern, which runs in a worker process.
    """

    scores_early = True

    def __init__(
        self,
        # Not None: YAML reads a leading # as a comment, and then the value as null.
        pattern: str = "",
        timeout: float = 1.0,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        check_pattern(pattern)
        self.pattern = pattern
        self._pool = WorkerPool.computing(1, timeout)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Gives the status `ok` or `no_match`; where the pattern takes too long, NaN and `timeout`."""
        texts = [sample.whole_turn for sample in samples]
        outcomes = [Outcome(Status.OK, DEFAULT.fullmatch(text) is not None) for text in texts]
        if self.pattern:
            outcomes = self._pool.map(inside("patterns.matches"), [[self.pattern, text] for text in texts])
        values = [float(outcome.value) if outcome.status == Status.OK else math.nan for outcome in outcomes]
        statuses = [Status.NO_MATCH if outcome.value is False else outcome.status for outcome in outcomes]
        return RewardResult(values, statuses)

    def close(self) -> None:
        self._pool.close()


def check_pattern(pattern: str) -> None:
    """Raises UsageError unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UsageError(f"pattern={pattern!r}: not a regular expression: {error}") from error
