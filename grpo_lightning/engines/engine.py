"""The base class of rollout engines, which answer requests with completions."""

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

Completions = Generator[tuple[int, Completion], None, None]
"""Yields the index of each request and its completion, in the order in which the completions end."""
Drawn = Completions
"""The name of `Completions` in engines that were written for version 0.2."""


class RolloutEngine(ABC):
    """Samples completions from the policy.

    An engine is used in this order: `check` once, then as often as needed `wake`, `sync`, `generate`, `sleep`, and
    `close` at the end. Only `generate` must be written.

    Four more class attributes are optional. The first three are False by default, and the last is an empty string:

    - `draws_elsewhere`: True if `generate` only waits, in a thread, for samples that servers make. It may then run
      while the policy learns.
    - `renews_midway`: True if `sync` may be called while `generate` runs. Completions go on with the new weights.
    - `gathers_weights`: True if `sync` assembles sharded weights itself, one tensor at a time. No rank then holds all.
    - `gap_causes`: A sentence for a message: why log-probs of this engine are likely to differ from the policy's.
    """

    shares_weights: ClassVar[bool] = False
    """True if it decodes with the policy's own weights. Sharded weights are then assembled while it generates.

    Other engines copy the weights in `sync`. Sharded weights are then assembled in `sync` alone.
    """
    reads_images: bool = False
    """True if it samples after prompts with images, whose `Request.image_states` it reads."""
    dtype: torch.dtype | None = None
    """The type of the engine's matrix products; None: the type that the policy computes in."""
    policy: Policy | None = None
    """The policy of the last `sync`; None before."""
    version: int | None = None
    """`Policy.version` at the last `sync`; None before. An engine that loses its weights sets it to None."""
    first_gap: float | None = None
    """Mean difference in nats to the policy's log-probs when they were first compared. Rounding explains it."""

    _is_awake: bool = False
    _fingerprint: bytes | None = None
    """`Policy.fingerprint` of the weights that the engine has copied."""

    @property
    def has_copies(self) -> bool:
        """True if the engine samples from copies of weights, which do not change when the policy's are written."""
        return not self.shares_weights

    def has(self, policy: Policy) -> bool:
        """Returns True if the engine samples from this version of `policy`."""
        return self.policy is policy and self.version == policy.version

    def has_weights_of(self, policy: Policy) -> bool:
        """Returns True if the engine has the weights of `policy`, whose fingerprints it compares, not the versions."""
        return not self.has_copies or self._fingerprint == policy.fingerprint()

    def product_dtype(self, policy: Policy) -> torch.dtype:
        """Returns the type of the engine's matrix products."""
        return self.dtype or compute_dtype(policy)

    def sync(self, policy: Policy) -> None:
        """Makes the engine sample from `policy` as it is now. It is called once per `Policy.version`, on every rank.

        An engine with weights of its own copies them, then calls this method of the base class.
        """
        self.policy, self.version = policy, policy.version
        self._fingerprint = policy.fingerprint() if self.has_copies else None

    def check(self, policy: Policy, sampling: Sampling) -> None:
        """Raises UsageError if the engine cannot decode this policy. It changes nothing. Every rank calls it."""

    def wake(self) -> None:
        """Takes the device memory that `sync` and `generate` need. An engine starts asleep."""

    def sleep(self) -> None:
        """Gives device memory back to training. An engine that drops its weights sets `version` to None."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Opens a context in which the engine is awake. A context inside another one does not wake it again."""
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
        """Opens a context in which the engine samples from `policy` as it is now. Every rank must enter it.

        Sharded weights are whole on a device only while the engine reads them.
        """
        shares = self.shares_weights
        with self.awake(), policy.gathered() if shares else nullcontext():
            is_current = self.has(policy) and self.has_weights_of(policy)
            if self.has_copies:
                # Weights written on one rank must be copied on all of them.
                is_current = all(ranks.gather(is_current))

            if not is_current:
                gathers_weights = getattr(self, "gathers_weights", False)
                with nullcontext() if shares or gathers_weights else policy.gathered():
                    self.sync(policy)
                # Sharded weights may have been whole during `sync`, and whole weights have another fingerprint.
                self._fingerprint = policy.fingerprint() if self.has_copies else None
            yield

    @contextmanager
    def conversations(self) -> Iterator[None]:
        """Opens a context in which requests may continue earlier completions, with the same weights.

        An engine may keep what it has computed for these completions, such as keys and values.
        """
        yield

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Completions:
        """Samples one completion per request, and yields its index and the completion as soon as it has ended.

        The random number of a token depends only on `key`, `prompt_id`, `sample` and the token's position. A completion
        ends with the first stop token, or with the token that completes a string of `sampling.stop`.

        A request or a stop string that the engine cannot handle is refused before the first completion. Between two
        completions the model is as it was before the call: mode, attention and weights. Close an iterator that is not
        used up.

        Args:
            requests: What to complete, at least one. Equal `prefix`es share their prefill, in whatever order they are.
            sampling: The distribution to sample from, and what ends a completion.
            key: Seed of the run and exploration step.
        """

    def complete(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> list[Completion]:
        """Returns the completions of `generate`, in the order of `requests`."""
        completions = dict(self.generate(requests, sampling, key))
        return [completions[index] for index in range(len(requests))]

    def close(self) -> None:
        """Frees what the engine holds: the next use begins with a `sync`. May be called twice."""
        self.policy = self.version = None
