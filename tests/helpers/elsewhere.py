"""Stand-ins for servers: engines with weights of their own that may draw while the policy learns."""

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch

from grpo_lightning.engines.engine import Drawn
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.engines.native.native import NativeEngine
from grpo_lightning.plugins.engines.scripted.scripted_engine import ScriptedEngine
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request


class Elsewhere(NativeEngine):
    """The native engine with a copy of the weights, made in `sync`.

    Args:
        seconds: What a draw takes at least, so that it goes on while the policy learns.
        fails_at: The step whose draw raises.
    """

    shares_weights = False
    draws_elsewhere = True

    def __init__(self, seconds: float = 0.0, fails_at: int = -1) -> None:
        super().__init__()
        self.seconds, self.fails_at = seconds, fails_at
        self.twin: Any = None
        self.copied: tuple[Policy | None, int] = None, -1

    def sync(self, policy: Policy) -> None:
        # Validation syncs in inference mode: a copy made there could never be written again.
        with torch.inference_mode(False), torch.no_grad():
            self.twin = self.twin or copy.deepcopy(policy).eval().requires_grad_(False)
            for own, new in zip(self.twin.parameters(), policy.parameters(), strict=True):
                own.copy_(new)
        super().sync(self.twin)
        self.copied = policy, policy.version

    def has(self, policy: Policy) -> bool:
        return self.version is not None and self.copied == (policy, policy.version)

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        if key.step == self.fails_at:
            raise RuntimeError("the server is gone")
        with torch.no_grad():
            half = self.seconds / 2
            time.sleep(half)
            yield from super().generate(requests, sampling, key)
            time.sleep(half)


class ScriptedElsewhere(ScriptedEngine):
    """Completions from a function, whatever the policy does meanwhile."""

    draws_elsewhere = renews_midway = True

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Drawn:
        time.sleep(0.01)
        yield from super().generate(requests, sampling, key)
