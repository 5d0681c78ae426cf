"""Lengths and positions of rollouts, and the tokens in them that the policy did not draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lightning.maths import ragged


class Context(NamedTuple):
    """Tokens inside completions that somebody else wrote: a tool's answer, an environment's turn."""

    ids: Tensor
    """[M] int64, end to end."""
    lengths: Tensor
    """[B] int64, given tokens of each completion."""
    position: Tensor
    """[N] int64, index of each drawn token among the drawn and given tokens of its completion."""

    def to(self, device: torch.device | str) -> "Context":
        """The same on another device."""
        return Context(*(values.to(device) for values in self))

    def select(self, rows: Tensor, tokens: Tensor) -> "Context":
        """That of some completions: [r] their rows, and the indices of their drawn tokens."""
        return Context(self.ids[ragged.take(rows, self.lengths)], self.lengths[rows], self.position[tokens])

    @classmethod
    def split(
        cls, token_ids: Tensor, lengths: Tensor, drawn: Sequence[Sequence[bool]]
    ) -> tuple[Tensor, Tensor, "Context"]:
        """The drawn tokens [N] of [N + M] `token_ids`, their lengths [B], and the others as context."""
        assert [len(flags) for flags in drawn] == lengths.tolist(), "one flag per token"
        is_sampled = torch.tensor([flag for flags in drawn for flag in flags], dtype=torch.bool)
        num_sampled = ragged.segment_sum(is_sampled.long(), ragged.segments(lengths), len(lengths))
        assert int(num_sampled.min()) > 0, "a completion has at least one drawn token"
        position = ragged.positions(lengths)[is_sampled]
        return token_ids[is_sampled], num_sampled, cls(token_ids[~is_sampled], lengths - num_sampled, position)

    @classmethod
    def concat(cls, batches: Sequence[tuple["Context | None", Tensor]]) -> "Context | None":
        """Several end to end, each with the [B] numbers of drawn tokens of its completions; None if none has any."""
        if not any(context for context, _ in batches):
            return None
        contexts = [context or cls.empty(num_sampled) for context, num_sampled in batches]
        return cls(*map(torch.cat, zip(*contexts, strict=True)))

    @classmethod
    def empty(cls, num_sampled: Tensor) -> "Context":
        """The context of completions of [B] `num_sampled` tokens that the policy drew alone."""
        return cls(num_sampled[:0], torch.zeros_like(num_sampled), ragged.positions(num_sampled))


@dataclass(slots=True)
class Sizes:
    """Lengths and positions on the host, so that laying out a forward pass does not wait for a GPU."""

    prompt_lengths: Tensor
    """[Q] int64."""
    group: Tensor
    """[B] int64."""
    lengths: Tensor
    """[B] int64, drawn tokens alone."""
    completion_lengths: Tensor
    """[B] int64, drawn and given tokens."""
    position: Tensor
    """[N] int64, index of each drawn token in its completion."""

    @classmethod
    def of(cls, prompt_lengths: Tensor, group: Tensor, lengths: Tensor, context: Context | None) -> "Sizes":
        """A copy on the host."""
        prompt_lengths, group, lengths = prompt_lengths.cpu(), group.cpu(), lengths.cpu()
        if context is None:
            return cls(prompt_lengths, group, lengths, lengths, ragged.positions(lengths))
        return cls(prompt_lengths, group, lengths, lengths + context.lengths.cpu(), context.position.cpu())

    @property
    def sequence_lengths(self) -> Tensor:
        """[B] tokens of prompt and completion together."""
        return self.prompt_lengths[self.group] + self.completion_lengths

    @property
    def drawn(self) -> Tensor:
        """[N] index of each drawn token among the tokens of all completions, end to end."""
        return ragged.spread(ragged.starts(self.completion_lengths), self.lengths) + self.position

    @property
    def order(self) -> Tensor:
        """[N + M] index of each token of all completions, end to end, among the drawn tokens and then the given."""
        is_context = torch.ones(int(self.completion_lengths.sum()), dtype=torch.bool)
        is_context[self.drawn] = False
        index = torch.cat([self.drawn, is_context.nonzero().flatten()])
        return torch.empty_like(index).index_copy_(0, index, torch.arange(len(index)))

    def micro_batches(self, max_tokens: int, by_group: bool = False) -> list[Tensor]:
        """The rows [r] of micro-batches of at most `max_tokens` tokens each.

        Args:
            max_tokens: Tokens of prompts, completions with their context, and padding; 0 sets no limit.
            by_group: Keep groups together, for a policy that shares their prompt, where any prompt has several.
        """
        if by_group and len(self.lengths) > len(self.prompt_lengths):
            lengths = self.prompt_lengths.tolist(), self.group.tolist(), self.completion_lengths.tolist()
            micro_batches = ragged.group_budget(*lengths, max_tokens)
        else:
            micro_batches = ragged.token_budget(self.sequence_lengths.tolist(), max_tokens)
        return [torch.tensor(rows) for rows in micro_batches]
