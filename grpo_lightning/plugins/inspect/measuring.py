"""Passes without gradients over completions that are recorded. Every rank makes the same number of forwards."""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.inspect.record import NUM_ALTERNATIVES
from grpo_lightning.policy.policy import Policy, TokenLogp
from grpo_lightning.training.packs import idle_pack
from grpo_lightning.training.preparation import over_packs


class Measure:
    """Measures completions with the policy as it is. Call it in eval mode, without gradients, on every rank.

    Args:
        policy: π_θ.
        max_tokens: Tokens in one forward; 0 sets no limit.
        device: Where the policy is.
    """

    def __init__(self, policy: Policy, max_tokens: int, device: torch.device) -> None:
        self.policy = policy
        self.max_tokens = max_tokens
        self.device = device

    def __call__(self, rollouts: Rollouts) -> TokenLogp:
        """Log-probs, entropies and the likeliest tokens at each drawn token, on the CPU, in the order of `rollouts`."""
        shape = (rollouts.num_tokens, NUM_ALTERNATIVES)
        logp, entropy = torch.zeros(2, rollouts.num_tokens, dtype=torch.float32)
        ids, top = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float32)
        found = TokenLogp(logp, entropy, ids, top)

        def look(pack: Rollouts) -> tuple[Tensor | None, ...]:
            scored = self.policy(pack, num_top=NUM_ALTERNATIVES)
            return scored.logp, scored.entropy, scored.top_ids, scored.top_logp

        self._fill(rollouts, (found.logp, found.entropy, found.top_ids, found.top_logp), look)
        return found

    def logp(self, rollouts: Rollouts, of: Callable[[Policy, Rollouts], Tensor]) -> Tensor:
        """[N] float32 log-probs of a snapshot, on the CPU."""
        found = torch.zeros(rollouts.num_tokens, dtype=torch.float32)
        self._fill(rollouts, (found,), lambda pack: (of(self.policy, pack),))
        return found

    def _fill(
        self,
        rollouts: Rollouts,
        found: tuple[Tensor | None, ...],
        look: Callable[[Rollouts], tuple[Tensor | None, ...]],
    ) -> None:
        """Writes what `look` returns pack by pack to where the tokens are in `found`."""
        packs = rollouts.rows_of_packs(self.max_tokens, self.policy.shares_prefix) if len(rollouts) else []
        idle = idle_pack(rollouts.temperature).to(self.device)
        for tokens, looks in over_packs(rollouts, packs, idle, self.device, look):
            for values, seen in zip(found, looks, strict=True):
                assert values is not None and seen is not None
                values[tokens] = seen.cpu()
