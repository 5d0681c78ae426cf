"""Controls for experiments, which no run should learn from: what training does with no signal, and with a bad one."""

import re
from collections.abc import Sequence
from hashlib import blake2b

from grpo_lightning.rewards.base import OK, Reward, RewardResult
from grpo_lightning.rewards.verifier.math_verifier import NO_ANSWER
from grpo_lightning.rewards.verifier.reading import MAX_DIGITS, canonical, same_number
from grpo_lightning.types import Sample, UsageError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)


class RandomReward(Reward):
    """1 with a probability, else 0, whatever the completion says: the control of Spurious Rewards (arXiv 2506.10947).

    The draw is a hash of seed, prompt and text, so it repeats on any machine, in any order. Equal completions of a
    prompt therefore draw alike, now and later; in the paper each draws for itself.

    Args:
        probability: Of a 1.
        seed: Of the draws.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.
    """

    def __init__(self, probability: float = 0.5, seed: int = 0, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if not 0 <= probability <= 1:
            raise UsageError(f"probability={probability} of RandomReward: give a number from 0 to 1")
        self.probability = probability
        self.seed = seed

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """0 or 1 a sample; it never fails."""
        values = [float(self._uniform(sample) < self.probability) for sample in samples]
        return RewardResult(values, [OK] * len(samples))

    def _uniform(self, sample: Sample) -> float:
        """In [0, 1)."""
        noise = blake2b(f"{self.seed}:{sample.prompt.id}:{sample.text}".encode(errors="surrogatepass"), digest_size=6)
        return int.from_bytes(noise.digest(), "big") / 2**48


class LastNumber(Reward):
    """1 if the last number of the completion is the gold answer. A bad idea, here as a control: use `MathVerifier`.

    It takes any number for an answer: one in the middle of a sentence that was cut off, the last of a list of guesses,
    one in the reasoning. Many graders fall back to it; in training that pays for luck and lets the answer's form decay.

    Args:
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.
    """

    finds_answers = True

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Status `ok`, or `no_answer` with 0 where there is no number; a gold answer that is no number gives 0."""
        numbers = [last_number(sample.text) for sample in samples]
        values = [
            float(number is not None and same_number(sample.answer, number))
            for sample, number in zip(samples, numbers, strict=True)
        ]
        return RewardResult(
            values,
            [NO_ANSWER if number is None else OK for number in numbers],
            [None if number is None else canonical(number) for number in numbers],
        )


def last_number(text: str) -> str | None:
    """The last number in `text`, as it stands there."""
    found = None
    for match in _NUMBER.finditer(text):
        found = match[0]
    return None if found is None else found[:MAX_DIGITS].rstrip(",")
