"""An engine with a copy of the weights, as vLLM has."""

import copy
from collections.abc import Sequence

from grpo_lightning import PlainEngine, Policy, RandomKey, Request, Sampling
from grpo_lightning.engines.engine import Completions


class Copying(PlainEngine):
    """Draws from a copy that `sync` makes."""

    shares_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.num_syncs = 0

    def sync(self, policy: Policy) -> None:
        self.num_syncs += 1
        self.copied = copy.deepcopy(policy)
        super().sync(policy)

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Completions:
        sampler = PlainEngine()
        sampler.sync(self.copied)
        return sampler.generate(requests, sampling, key)
