"""One exploration step's completions as flat, ragged tensors: what every token-level formula works on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import ragged


class Rollouts:
    """B completions of Q prompts: N completion tokens in one flat vector, without padding and without masks.

    A plain class on purpose: Lightning's half precision plugins cast every float tensor they find in a batch of the
    usual collections, and log-probs rounded to bfloat16 are worthless.

    Args:
        prompt_token_ids: [sum of prompt lengths] int64, the prompts end to end, each once.
        prompt_lengths: [Q] int64, at least 1 each.
        group: [B] int64, the prompt that each completion answers.
        token_ids: [N] int64, the completions end to end, stop tokens included.
        lengths: [B] int64, |o_i|, at least 1 each.
        advantage: [N] float32, Â of each token.
        weight: [N] float32, the factor of each token in the objective, fixed before the passes.
        old_logp: [N] float32, log π_old of each token; None where π_old is π_θ at this very update, so the ratio is 1.
        ref_logp: [N] float32, log π_ref of each token; None without a reference.
        sampler_logp: [N] float32, what the engine noted, where that should equal log π_old; else None.
        row: [B] int64, the row's place in the exploration step, for messages.
    """

    def __init__(
        self,
        prompt_token_ids: Tensor,
        prompt_lengths: Tensor,
        group: Tensor,
        token_ids: Tensor,
        lengths: Tensor,
        advantage: Tensor | None = None,
        weight: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        row: Tensor | None = None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.prompt_lengths = prompt_lengths
        self.group = group
        self.token_ids = token_ids
        self.lengths = lengths
        zeros = torch.zeros(len(token_ids), dtype=torch.float32, device=token_ids.device)
        self.advantage = zeros if advantage is None else advantage
        self.weight = zeros if weight is None else weight
        self.old_logp = old_logp
        self.ref_logp = ref_logp
        self.sampler_logp = sampler_logp
        self.row = torch.arange(len(lengths), device=lengths.device) if row is None else row
        assert group.shape == lengths.shape == self.row.shape
        for values in (self.advantage, self.weight, old_logp, ref_logp, sampler_logp):
            assert values is None or (values.shape == token_ids.shape and values.dtype == torch.float32)

    @classmethod
    def from_lists(
        cls, prompts: Sequence[Sequence[int]], group: Sequence[int], completions: Sequence[Sequence[int]]
    ) -> "Rollouts":
        """Prompts [Q] and completions [B] as lists of token ids; `group` names each completion's prompt."""
        return cls(
            prompt_token_ids=torch.tensor([token for prompt in prompts for token in prompt]),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
            group=torch.tensor(group),
            token_ids=torch.tensor([token for completion in completions for token in completion]),
            lengths=torch.tensor([len(completion) for completion in completions]),
        )

    def __len__(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids)

    @property
    def sequence_lengths(self) -> Tensor:
        """[B] tokens of prompt and completion together."""
        return self.prompt_lengths[self.group] + self.lengths

    def to(self, device: torch.device | str) -> "Rollouts":
        """A copy with every tensor on `device`; dtypes stay."""
        moved: dict[str, Any] = {name: None if v is None else v.to(device) for name, v in vars(self).items()}
        return Rollouts(**moved)

    def select(self, rows: Tensor) -> "Rollouts":
        """The completions `rows` [r], in that order, with only the prompts they need."""
        tokens = ragged.take(rows, self.lengths)
        groups, group = self.group[rows].unique(return_inverse=True)

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[tokens]

        return Rollouts(
            prompt_token_ids=self.prompt_token_ids[ragged.take(groups, self.prompt_lengths)],
            prompt_lengths=self.prompt_lengths[groups],
            group=group,
            token_ids=self.token_ids[tokens],
            lengths=self.lengths[rows],
            advantage=of(self.advantage),
            weight=of(self.weight),
            old_logp=of(self.old_logp),
            ref_logp=of(self.ref_logp),
            sampler_logp=of(self.sampler_logp),
            row=self.row[rows],
        )

    def split(self, max_tokens: int, by_group: bool = False) -> list["Rollouts"]:
        """Micro-batches of at most `max_tokens` each.

        Args:
            max_tokens: Tokens of prompts, completions and padding; 0 sets no limit.
            by_group: Keep groups together, for a policy that shares their prompt; then there is no padding.
        """
        if by_group:
            sizes = self.prompt_lengths.tolist(), self.group.tolist(), self.lengths.tolist()
            batches = ragged.group_budget(*sizes, max_tokens)
        else:
            batches = ragged.token_budget(self.sequence_lengths.tolist(), max_tokens)
        return [self.select(torch.tensor(rows, device=self.lengths.device)) for rows in batches]
