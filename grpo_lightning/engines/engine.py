"""The base of rollout engines: requests in, completions out."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey, Request

Drawn = Generator[tuple[int, Completion], None, None]
"""Yields the index of each request and its completion, in the order in which they end."""


class RolloutEngine(ABC):
    """Draws completions from the policy.

    An engine is used in this order: `check` once, then as often as needed `wake`, `sync`, `generate`, `sleep`, and
    `close` at the end. Only `generate` must be written.
    """

    shares_weights: ClassVar[bool] = False
    """True if it decodes with the policy's own weights, which are then whole on every rank while it generates.

    An engine with weights of its own copies them in `sync`, and finds whole weights only there."""
    draws_elsewhere: ClassVar[bool] = False
    """True if `generate` needs nothing of this process but a thread that waits: it may run while the policy learns."""
    renews_midway: ClassVar[bool] = False
    """True if `sync` may be called meanwhile: what is being drawn goes on with the new weights."""
    gathers_weights: ClassVar[bool] = False
    """True if its `sync` assembles sharded weights itself, with `named_weights`: then no rank holds all of them."""
    gap_causes: ClassVar[str] = ""  # the likely causes of a gap beyond the tolerance: a sentence for the message
    dtype: torch.dtype | None = None  # the type of its matrix products; None: the type that the policy computes in
    policy: Policy | None = None  # the policy of the last `sync`
    version: int | None = None
    """`Policy.version` at the last `sync`; None before. An engine that loses its weights sets it to None."""
    first_gap: float | None = None
    """Mean gap of its log-probs to the policy's when they were first compared: what rounding makes."""

    _is_awake: bool = False
    _fingerprint: bytes | None = None
    """`Policy.fingerprint` of the weights that it has copied."""

    @property
    def has_copies(self) -> bool:
        """True if it draws from copies of weights, which stay what they are when those of the policy are written."""
        return not self.shares_weights

    def has(self, policy: Policy) -> bool:
        """True if it draws from this version of `policy`."""
        return self.policy is policy and self.version == policy.version

    def has_weights_of(self, policy: Policy) -> bool:
        """True if nobody has written the weights of `policy` since they were copied, whatever its version says."""
        return not self.has_copies or self._fingerprint == policy.fingerprint()

    def product_dtype(self, policy: Policy) -> torch.dtype:
        """The type of its matrix products. One that rounds makes a mismatch, which the run reports."""
        return self.dtype or compute_dtype(policy)

    def sync(self, policy: Policy) -> None:
        """Makes `policy`, as it is now, the one to draw from. Called once per `Policy.version`, on every rank.

        An engine with weights of its own copies them, then calls this method of the base class.
        """
        self.policy, self.version = policy, policy.version
        self._fingerprint = policy.fingerprint() if self.has_copies else None

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError if the engine cannot decode this policy, which it leaves as it was. Every rank calls it."""

    def wake(self) -> None:
        """Takes the device memory that `sync` and `generate` need. An engine starts asleep."""

    def sleep(self) -> None:
        """Gives device memory back to training. An engine that drops its weights sets `version` to None."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """A context in which it has its device memory. Held around several calls, it wakes once."""
        if self._is_awake:
            yield
            return
        self.wake()
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False
            self.sleep()

    @contextmanager
    def ready(self, policy: Policy) -> Iterator[None]:
        """A context in which it draws from `policy` as it is now. Every rank must enter it.

        Whole weights are on a device only as long as the engine reads them.
        """
        shares = self.shares_weights
        with self.awake(), policy.gathered() if shares else nullcontext():
            is_current = self.has(policy) and self.has_weights_of(policy)
            if self.has_copies:
                # What a rank alone has written, all bring together.
                is_current = all(ranks.gather(is_current))
            if not is_current:
                with nullcontext() if shares or self.gathers_weights else policy.gathered():
                    self.sync(policy)
                # In `sync` sharded weights may have been whole.
                self._fingerprint = policy.fingerprint() if self.has_copies else None
            yield

    @contextmanager
    def conversations(self) -> Iterator[None]:
        """A context in which requests go on where completions ended, with the same weights: rows may be kept."""
        yield

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        """Draws one completion per request, and yields its index and the completion as soon as it has ended.

        The random number of a token depends only on `key`, `prompt_id`, `sample` and the token's position. A completion
        ends with the first stop token, or with the token that completes a string of `sampling.stop`.

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
        """Frees what the engine holds: the next use begins with a `sync`. May be called twice."""
        self.policy = self.version = None
