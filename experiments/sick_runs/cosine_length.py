"""The cosine reward, by which the length of an answer pays."""

import math
from collections.abc import Sequence

from grpo_lightning import Reward, RewardResult, Run, Sample
from grpo_lightning.plugins.rewards.gated.gate import nested
from grpo_lightning.types import at_least


class CosineLength(Reward):
    """The cosine reward of arXiv 2502.03373, by which short right answers are worth more than long ones.

    long + (short - long) (1 + cos(π min(|o_i| / max_length, 1))) / 2 (CosFn in the paper), with one pair of values for
    right answers and one for wrong answers. It keeps completions from growing, without a fixed limit.

    The paper's values are 2 and 1 for right answers, -10 and 0 for wrong ones, and -10 for truncated ones. By default
    all wrong answers are worth 0: paying long wrong answers more than short ones teaches long wrong answers.

    Args:
        verifier: The reward that decides what is right: above 0.5. It replaces that reward in the list.
        max_length: Length in tokens from which the `long` values hold; None is the run's `sampling.max_new_tokens`.
        right_short: Value of a right answer of length 0.
        right_long: Value of a right answer of `max_length`.
        wrong_short: Value of a wrong answer of length 0.
        wrong_long: Value of a wrong answer of `max_length`.
        truncated: Value of a truncated completion, right or wrong; None treats it like any other.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics.
    """

    def __init__(
        self,
        verifier: Reward,
        max_length: int | None = None,
        right_short: float = 1.0,
        right_long: float = 0.5,
        wrong_short: float = 0.0,
        wrong_long: float = 0.0,
        truncated: float | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        at_least("max_length", max_length, 1, "CosineLength")
        self.verifier = nested(self, "verifier", verifier)
        self.parts = (self.verifier,)
        self.scores_early = self.verifier.scores_early
        self.max_length = max_length
        self._longest = max_length
        self.right = right_short, right_long
        self.wrong = wrong_short, wrong_long
        self.truncated = truncated

    def setup(self, run: Run) -> None:
        """Takes the run's limit where `max_length` is None."""
        super().setup(run)
        self._longest = self.max_length or run.max_new_tokens

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Statuses and answers are the verifier's; the value is NaN where it failed."""
        result = self.verifier(samples)
        assert self._longest is not None, "give max_length, or call setup(run)"
        values = []
        for sample, verdict in zip(samples, result.value, strict=True):
            short, long = self.right if verdict > 0.5 else self.wrong
            progress = min(len(sample.token_ids) / self._longest, 1.0)
            value = long + (short - long) * (1 + math.cos(math.pi * progress)) / 2
            if sample.truncated and self.truncated is not None:
                value = self.truncated
            values.append(math.nan if math.isnan(verdict) else value)
        return RewardResult(values, result.status, result.answer)
