"""What a rollout engine is: prompts in, groups of completions out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, Prompt

Progress = Callable[[int], None]
"""Told the number of completions that just ended."""


class RolloutEngine(ABC):
    """Draws completions from the policy."""

    exact: ClassVar[bool] = False
    """Whether completions come from the policy's own weights, so that unfiltered fp32 log-probs equal the policy's."""

    policy: Policy | None = None

    def sync(self, policy: Policy) -> None:
        """Makes `policy`, as it is now, the one to draw from."""
        self.policy = policy

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError if the engine cannot decode this policy, before anything is done.

        Every rank calls it, with whole weights or inside a strategy that shares them out. It leaves the policy and the
        random numbers as they were.
        """

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int = 0,
        step: int = 0,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """`group_size` completions of each prompt, those of one prompt together, in the order of `prompts`.

        Args:
            prompts: What to complete; `Prompt.id` keys the random numbers.
            group_size: G.
            sampling: The distribution to draw from.
            seed: Key of the run.
            step: Key of the exploration step: the same prompt gets new completions at another step.
            progress: Called now and then with the number of completions ended since the last call.
        """

    def close(self) -> None:
        """Gives back what the engine holds. May be called twice."""
