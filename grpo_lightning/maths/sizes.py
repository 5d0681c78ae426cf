"""Lengths and positions of rollouts, and their context: the tokens that the policy did not sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lightning.maths import ragged


class Context(NamedTuple):
    """Tokens inside completions that the policy did not sample: a tool's answer, an environment's turn."""

    ids: Tensor
    """[M] int64, the context tokens of all completions, end to end."""
    lengths: Tensor
    """[B] int64, the number of context tokens of each completion."""
    position: Tensor
    """[N] int64, the index of each sampled token among all tokens of its completion."""

    def to(self, device: torch.device | str) -> "Context":
        """Returns a copy on another device."""
        return Context(*(values.to(device) for values in self))

    def select(self, rows: Tensor, tokens: Tensor) -> "Context":
        """Returns the context of the completions `rows` [r], whose sampled tokens have the indices `tokens`."""
        return Context(self.ids[ragged.take(rows, self.lengths)], self.lengths[rows], self.position[tokens])

    @classmethod
    def split(
        cls, token_ids: Tensor, lengths: Tensor, is_sampled: Sequence[Sequence[bool]]
    ) -> tuple[Tensor, Tensor, "Context"]:
        """Splits [N + M] `token_ids` into sampled tokens [N] with their lengths [B], and context."""
        assert [len(flags) for flags in is_sampled] == lengths.tolist(), "one flag per token"
        mask = torch.tensor([flag for flags in is_sampled for flag in flags], dtype=torch.bool)
        num_sampled = ragged.segment_sum(mask.long(), ragged.segments(lengths), len(lengths))
        assert int(num_sampled.min()) > 0, "a completion has at least one sampled token"
        position = ragged.positions(lengths)[mask]
        return token_ids[mask], num_sampled, cls(token_ids[~mask], lengths - num_sampled, position)

    @classmethod
    def concat(cls, batches: Sequence[tuple["Context | None", Tensor]]) -> "Context | None":
        """Concatenates contexts, each given with the [B] numbers of sampled tokens; None if no batch has context."""
        if not any(context for context, _ in batches):
            return None
        contexts = [context or cls.empty(num_sampled) for context, num_sampled in batches]
        return cls(*map(torch.cat, zip(*contexts, strict=True)))

    @classmethod
    def empty(cls, num_sampled: Tensor) -> "Context":
        """Returns the context of completions without context tokens, of [B] `num_sampled` sampled tokens."""
        return cls(num_sampled[:0], torch.zeros_like(num_sampled), ragged.positions(num_sampled))


@dataclass(slots=True)
class Sizes:
    """Lengths and positions on the host, so that laying out a forward pass does not wait for a GPU."""

    prompt_lengths: Tensor
    """[Q] int64, the number of tokens of each prompt."""
    group: Tensor
    """[B] int64, the index of each row's prompt."""
    lengths: Tensor
    """[B] int64, the number of sampled tokens of each row."""
    completion_lengths: Tensor
    """[B] int64, the number of sampled tokens and context tokens of each row."""
    position: Tensor
    """[N] int64, the index of each sampled token among all tokens of its row."""

    @classmethod
    def of(cls, prompt_lengths: Tensor, group: Tensor, lengths: Tensor, context: Context | None) -> "Sizes":
        """Copies the sizes of rollouts to the host."""
        lengths = lengths.cpu()
        if context is None:
            return cls(prompt_lengths.cpu(), group.cpu(), lengths, lengths, ragged.positions(lengths))
        completion_lengths = lengths + context.lengths.cpu()
        return cls(prompt_lengths.cpu(), group.cpu(), lengths, completion_lengths, context.position.cpu())

    @property
    def sequence_lengths(self) -> Tensor:
        """[B] int64, the number of tokens of prompt and completion together."""
        return self.prompt_lengths[self.group] + self.completion_lengths

    @property
    def sampled(self) -> Tensor:
        """[N] int64, the index of each sampled token among the tokens of all completions, end to end."""
        return ragged.per_element(ragged.starts(self.completion_lengths), self.lengths) + self.position

    @property
    def order(self) -> Tensor:
        """[N + M] int64, the index of each token of all completions among the sampled and then the context tokens."""
        is_context = torch.ones(int(self.completion_lengths.sum()), dtype=torch.bool)
        is_context[self.sampled] = False
        index = torch.cat([self.sampled, is_context.nonzero().flatten()])
        return torch.empty_like(index).index_copy_(0, index, torch.arange(len(index)))

    def micro_batches(self, max_tokens: int, by_group: bool = False) -> list[Tensor]:
        """Cuts rows into micro-batches of at most `max_tokens` tokens each. Returns the rows [r] of each.

        Args:
            max_tokens: Tokens of prompts, completions with their context, and padding; 0 sets no limit.
            by_group: Keep groups together if a prompt has several rows, for a policy that shares their prompt.
        """
        if by_group and len(self.lengths) > len(self.prompt_lengths):
            lengths = self.prompt_lengths.tolist(), self.group.tolist(), self.completion_lengths.tolist()
            micro_batches = ragged.group_budget(*lengths, max_tokens)
        else:
            micro_batches = ragged.token_budget(self.sequence_lengths.tolist(), max_tokens)
        return [torch.tensor(rows) for rows in micro_batches]
