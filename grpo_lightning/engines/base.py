"""What a rollout engine is: requests in, completions out."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey, Request

Drawn = Generator[tuple[int, Completion], None, None]
"""Yields the index of each request and its completion, in the order in which they end."""

LOGP_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1.0, torch.bfloat16: 1.0}
"""Gap in nats of one token that rounding explains between two ways to compute a log-prob, by the type of the products.

A maximum grows with the number of tokens: in bfloat16 it is 0.3 of 1,500 tokens, and may be 1 of a million."""

MEAN_FRACTION = 0.12
"""Largest mean gap that rounding explains, as a fraction of that of one token. In bfloat16 0.04 was measured."""

FAR_FRACTION = 0.01
"""Largest fraction of tokens beyond 1 nat that rounding explains: a router may send some to another expert."""


class RolloutEngine(ABC):
    """Draws completions from the policy.

    An engine is used in this order: `check` once, then as often as needed `wake`, `sync`, `generate`, `sleep`, and
    `close` at the end. Only `generate` must be written.
    """

    shares_weights: ClassVar[bool] = False
    """Whether it decodes with the policy's own weights, which are then whole on every rank while it generates.

    An engine with weights of its own copies them in `sync`, and finds whole weights only there."""

    gathers_weights: ClassVar[bool] = False
    """Whether its `sync` assembles sharded weights itself, with `named_weights`: then no rank holds all of them."""

    logp_tolerance: ClassVar[Mapping[torch.dtype, float]] = LOGP_TOLERANCE
    """Largest gap of one token in nats between its log-probs and the policy's that rounding explains.

    By the type that the policy computes in. Beyond it the run warns. Where the mean is beyond `MEAN_FRACTION` of it, or
    more than `FAR_FRACTION` of the tokens are off by over 1 nat, an engine with weights of its own stops the run."""

    gap_causes: ClassVar[str] = ""
    """What is likely wrong where the gap is beyond the tolerance: a sentence for the message."""

    dtype: torch.dtype | None = None
    """The type of its matrix products; None: the type that the policy computes in."""

    policy: Policy | None = None
    """The policy of the last `sync`."""

    version: int | None = None
    """`Policy.version` at the last `sync`; None before. An engine that loses its weights sets it to None."""

    def has(self, policy: Policy) -> bool:
        """Whether it draws from `policy` as it is now, so that no `sync` is needed."""
        return self.policy is policy and self.version == policy.version

    def product_dtype(self, policy: Policy) -> torch.dtype:
        """The type of its matrix products. One that rounds makes a mismatch, which the run reports."""
        return self.dtype or compute_dtype(policy)

    def sync(self, policy: Policy) -> None:
        """Makes `policy`, as it is now, the one to draw from. Called once per `Policy.version`, on every rank.

        An engine with weights of its own copies them here, then calls this method of the base class.
        """
        self.policy, self.version = policy, policy.version

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError if the engine cannot decode this policy, before anything is done.

        Every rank calls it, with whole weights or inside a strategy that shards them. It leaves the policy and the
        global random numbers as they were.
        """

    def wake(self) -> None:
        """Takes the device memory that `sync` and `generate` need. An engine starts asleep."""

    def sleep(self) -> None:
        """Gives device memory back to training; the next call is `wake`.

        An engine that drops its weights sets `version` to None, so that they are synced again.
        """

    @contextmanager
    def conversations(self) -> Iterator[None]:
        """Inside, a request goes on where a completion has ended: an engine may keep what it knows of its tokens.

        The weights stay as they are inside. It changes speed, memory and rounding, never the distribution. Here nothing
        is done: vLLM has its prefix cache, and a scripted engine reads nothing.
        """
        yield

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        """Draws one completion per request, and yields its index and the completion as soon as it has ended.

        The random number of a token depends only on `key`, `prompt_id`, `sample` and the token's position. The other
        requests and their order do not matter.

        A completion ends with the first stop token, or with the token that completes a string of `sampling.stop`:
        `StopStrings.cut` finds it.

        What cannot be drawn is refused before the first completion is asked for. Between two completions the model is
        as it was before the call: mode, attention and weights. Close an iterator that is not used up.

        Args:
            requests: What to complete, at least one. Equal `token_ids` share their prefill, in whatever order they are.
            sampling: The distribution to draw from, and what ends a completion.
            key: Seed of the run and exploration step.
        """

    def complete(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> list[Completion]:
        """The completions of `generate`, in the order of `requests`."""
        ended = dict(self.generate(requests, sampling, key))
        return [ended[index] for index in range(len(requests))]

    def close(self) -> None:
        """Frees what the engine holds. May be called twice, and `wake` may come after it.

        An engine that overrides it calls this method of the base class: the next use begins with a `sync`.
        """
        self.policy = self.version = None
