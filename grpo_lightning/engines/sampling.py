"""Sampling a token from logits: temperature, filters, and the inverse of the cumulative distribution."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from grpo_lightning.types import BROKEN, UsageError, at_least, require


@dataclass
class Sampling:
    """The distribution that completions are sampled from.

    Args:
        max_new_tokens: Longest completion in tokens, stop token included. One that is cut off there is truncated.
        temperature: Divides the logits, in sampling and in the policy's log-probs alike. 0 is greedy decoding.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens whose probabilities reach this sum; 1 keeps all.
        min_p: Keep the tokens with at least this fraction of the likeliest token's probability; 0 keeps all.
        stop: Strings that end a completion, beside the model's stop tokens. The text ends with the string, the tokens
            with the token that completes it. A special token, such as `<|im_end|>`, may stand here too.
    """

    max_new_tokens: int = 256
    """Longest completion in tokens, at least 1."""
    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy decoding."""
    top_k: int = 0
    """Number of likeliest tokens to keep; 0 keeps all."""
    top_p: float = 1.0
    """Probability that the tokens to keep reach together; 1 keeps all."""
    min_p: float = 0.0
    """Smallest fraction of the likeliest token's probability to keep; 0 keeps all."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a completion."""

    def __post_init__(self) -> None:
        at_least("sampling.max_new_tokens", self.max_new_tokens, 1)
        at_least("sampling.temperature", self.temperature, 0)
        at_least("sampling.top_k", self.top_k, 0)
        require(0 < self.top_p <= 1, f"sampling.top_p={self.top_p}: give a number above 0, at most 1 (keep all)")
        require(0 <= self.min_p <= 1, f"sampling.min_p={self.min_p}: give a number from 0 (keep all) to 1")
        require(not isinstance(self.stop, str), f"sampling.stop={self.stop!r}: give a list of strings, [{self.stop!r}]")
        if not all(self.stop) or any(BROKEN in string for string in self.stop):
            raise UsageError(
                f"sampling.stop={self.stop!r}: give strings that are not empty, without U+FFFD, which stands for "
                "broken bytes"
            )

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken and nothing is random."""
        return self.temperature == 0

    @property
    def unfiltered(self) -> bool:
        """True if every token can be sampled, so that the sampler's log-probs are the policy's."""
        return not self.greedy and self.top_k == 0 and self.top_p == 1 and self.min_p == 0


@dataclass
class ValidationSampling:
    """Sampling overrides for validation, test and prediction. None leaves the value of `model.sampling`.

    Args:
        max_new_tokens: Longest completion in tokens, the greedy completion included.
        temperature: Divides the logits. 0 makes all completions greedy, and so the same.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens whose probabilities reach this sum; 1 keeps all.
        min_p: Keep the tokens with at least this fraction of the likeliest token's probability; 0 keeps all.
        stop: Strings that end a completion; an empty list leaves only the stop tokens.
    """

    max_new_tokens: int | None = None
    """Longest completion in tokens, at least 1."""
    temperature: float | None = None
    """Divisor of the logits; 0 is greedy decoding."""
    top_k: int | None = None
    """Number of likeliest tokens to keep; 0 keeps all."""
    top_p: float | None = None
    """Probability that the tokens to keep reach together; 1 keeps all."""
    min_p: float | None = None
    """Smallest fraction of the likeliest token's probability to keep; 0 keeps all."""
    stop: list[str] | None = None
    """Strings that end a completion."""

    def over(self, sampling: Sampling) -> Sampling:
        """Returns the sampling of validation, where training has `sampling`."""
        overrides = {name: value for name, value in vars(self).items() if value is not None}
        try:
            return replace(sampling, **overrides)
        except UsageError as error:
            raise UsageError(f"validation.{error}") from error


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """[B] int64 tokens and their [B] float32 log-probs, from [B, V] logits and [B] uniform numbers in [0, 1).

    The log-probs are taken after temperature and filters; with greedy decoding, at temperature 1.
    """
    logits = logits.float()
    if sampling.greedy:
        logp = logits.log_softmax(-1)
        token = logp.argmax(-1, keepdim=True)
    else:
        # Each pass over a large vocabulary counts: x / 1 is x to the bit.
        scaled = logits if sampling.temperature == 1 else logits / sampling.temperature
        logp = (scaled if sampling.unfiltered else _filtered(scaled, sampling)).log_softmax(-1)
        cdf = cumulative(logp.exp())
        if not sampling.unfiltered:
            # A parallel cumsum may dip by a rounding error, and then the search may end on a filtered token.
            cdf = cdf.masked_fill(logp == -torch.inf, 0.0).cummax(-1).values
        # A float32 below 1 is at most 1 - 2^-24, whose product with the total rounds to less than the total. So the
        # search always ends on a token with probability.
        target = uniform[:, None] * cdf[:, -1:]
        # NaN logits have no index; the clamp lets them through to the update, which reports them.
        token = torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[-1] - 1)
    return token.squeeze(-1), logp.gather(-1, token).squeeze(-1)


def cumulative(probability: Tensor) -> Tensor:
    """[B, V] cumulative sums of the probabilities; float64 where CUDA must be deterministic."""
    # CUDA has no deterministic cumulative sum of floats, and raises under `trainer.deterministic: true`.
    must_be_exact = probability.is_cuda and torch.are_deterministic_algorithms_enabled()
    return fixed_point_cumsum(probability) if must_be_exact else probability.cumsum(-1)


def fixed_point_cumsum(probability: Tensor) -> Tensor:
    """[B, V] float64 cumulative sums in multiples of 2^-40: integers, whose sum is the same in any order."""
    return (probability.double() * 2.0**40).long().cumsum(-1).double() * 2.0**-40


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] logits, -inf at the tokens that top_k, top_p and min_p exclude."""
    keep = torch.ones_like(logits, dtype=torch.bool)
    if 0 < sampling.top_k < logits.shape[-1]:
        keep &= logits >= logits.topk(sampling.top_k).values[:, -1:]
    if sampling.min_p > 0:
        probability = logits.softmax(-1)
        keep &= probability >= sampling.min_p * probability.amax(-1, keepdim=True)
    if sampling.top_p < 1:
        # A token stays if the likelier tokens have less than top_p together: so the likeliest always stays.
        probability, order = logits.masked_fill(~keep, -torch.inf).softmax(-1).sort(descending=True, stable=True)
        is_inside = cumulative(probability) - probability < sampling.top_p
        keep &= torch.zeros_like(keep).scatter(-1, order, is_inside)
    return logits.masked_fill(~keep, -torch.inf)
