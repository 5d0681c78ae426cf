"""Surrogates for groups with demonstrations; sampled completions keep another surrogate."""

from abc import abstractmethod

import torch
from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Clipped, Surrogate, SurrogateResult
from grpo_lightning.types import require

DEMONSTRATED = "demonstrated"
"""Column [N] float32: 1 for the tokens of a demonstration, 0 for sampled tokens."""
EMPHASIS = "emphasis"
"""Column [N] float32: the source's factor on the token's objective."""


class _Mixed(Surrogate):
    """Takes a surrogate for sampled completions, and another formula for demonstrations."""

    def __init__(self, surrogate: Surrogate | None = None) -> None:
        self.surrogate = surrogate or Clipped()
        self.reads_old_logp = self.surrogate.reads_old_logp

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        return self.surrogate.prepare(rollouts)

    @abstractmethod
    def imitated(self, logp: Tensor, advantage: Tensor) -> Tensor:
        """[N] the objective of each token, as if all tokens were of demonstrations."""

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        result = self.surrogate(logp, old_logp, rollouts)
        if DEMONSTRATED not in rollouts.columns:
            return result
        is_shown = rollouts.columns[DEMONSTRATED] > 0
        value = torch.where(is_shown, self.imitated(logp, rollouts.advantage), result.value)
        # No bound holds for a demonstration.
        masks = (result.clipped_low, result.clipped_high, result.unreachable)
        return SurrogateResult(rollouts.columns[EMPHASIS] * value, *(mask & ~is_shown for mask in masks))


class LUFFY(_Mixed):
    """LUFFY: f(π_θ) Â on demonstrations, with f(x) = x / (x + γ) (arXiv 2504.14945, "Policy Shaping").

    Demonstrations count in their group's mean, so their advantage is positive where the policy's answers are worse.
    The probability under π_φ, which wrote them, is taken as 1. f gives more weight to tokens that the policy finds
    unlikely: its slope is γ / (x + γ)^2. The paper combines it with a demonstration in groups of G = 8, `GroupMean`,
    `FixedLength`, and no clip on sampled tokens.

    Args:
        surrogate: The objective of sampled completions; by default `Clipped`.
        gamma: γ; the paper takes 0.1.
    """

    def __init__(self, surrogate: Surrogate | None = None, gamma: float = 0.1) -> None:
        super().__init__(surrogate)
        require(gamma > 0, f"gamma={gamma} of LUFFY: give more than 0; the paper takes 0.1")
        self.gamma = gamma

    def imitated(self, logp: Tensor, advantage: Tensor) -> Tensor:
        probability = logp.exp()
        return probability / (probability + self.gamma) * advantage


class CHORD(_Mixed):
    """CHORD: (1 - μ) times a surrogate on sampled completions, μ times φ log π_θ on demonstrations (arXiv 2508.11408).

    L = (1 - μ) L_GRPO + μ L_SFT. Set `loop.source.mu`, and `loop.source.reward: null`: a demonstration then takes no
    part in its group's statistics. CHORD-μ anneals μ from 0.9 to 0.05; CHORD-φ keeps it at about 0.1 and sets `phi`.

    Args:
        surrogate: The objective of sampled completions; by default `Clipped`.
        phi: Weigh each token by φ = sg(p (1 - p)), p its probability: certain and very unlikely tokens count little.
    """

    moves_without_advantage = True

    def __init__(self, surrogate: Surrogate | None = None, phi: bool = False) -> None:
        super().__init__(surrogate)
        self.phi = phi

    def imitated(self, logp: Tensor, advantage: Tensor) -> Tensor:
        probability = logp.detach().exp()
        return probability * (1 - probability) * logp if self.phi else logp
