"""Controls for experiments: training with no signal, and with a bad one. Use neither for a policy you want."""

import re
from collections.abc import Sequence
from hashlib import blake2b

from grpo_lightning.plugins.rewards.verifier.reading import canonical
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.types import Sample, Status, UsageError

MAX_DIGITS = 200
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)


class RandomReward(Reward):
    """1 with a fixed probability, else 0, whatever the completion (the control of Spurious Rewards, arXiv 2506.10947).

    It shows what training does without a signal. The draw is a hash of seed, prompt and text, so it is the same on any
    machine and in any order. Equal completions of a prompt therefore always draw alike; in the paper each draws anew.

    Args:
        probability: Probability of a 1.
        seed: Seed of the draws.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics.
    """

    def __init__(self, probability: float = 0.5, seed: int = 0, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if not 0 <= probability <= 1:
            raise UsageError(f"probability={probability} of RandomReward: give a number from 0 to 1")
        self.probability = probability
        self.seed = seed

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """0 or 1 per sample; it never fails."""
        values = [float(self._uniform(sample) < self.probability) for sample in samples]
        return RewardResult(values, [Status.OK] * len(samples))

    def _uniform(self, sample: Sample) -> float:
        """A number in [0, 1)."""
        noise = blake2b(f"{self.seed}:{sample.prompt.id}:{sample.text}".encode(errors="surrogatepass"), digest_size=6)
        return int.from_bytes(noise.digest(), "big") / 2**48


class LastNumber(Reward):
    """1 if the last number of the completion is the gold answer, else 0. A control; for training use `MathVerifier`.

    Many graders fall back to the last number. It accepts a number in a sentence that was cut off, the last of several
    guesses, or one in the reasoning. In training that pays for luck, and the form of the answer decays.
    """

    finds_answers = True

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Status `ok`, or `no_answer` and 0 where there is no number. A gold answer that is not a number gives 0."""
        numbers = [last_number(sample.text) for sample in samples]
        values = [
            float(number is not None and canonical(sample.answer) == canonical(number))
            for sample, number in zip(samples, numbers, strict=True)
        ]
        return RewardResult(
            values,
            [Status.NO_ANSWER if number is None else Status.OK for number in numbers],
            [None if number is None else canonical(number) for number in numbers],
        )


def last_number(text: str) -> str | None:
    """The last number in `text`, as it is written there."""
    found = None
    for match in _NUMBER.finditer(text):
        found = match[0]
    return None if found is None else found[:MAX_DIGITS].rstrip(",")
