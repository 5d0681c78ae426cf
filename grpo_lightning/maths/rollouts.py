"""The record: the completions of one exploration step, as flat vectors over the tokens that the policy drew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths import ragged
from grpo_lightning.maths.columns import Columns
from grpo_lightning.maths.sizes import Context, Sizes

FIELDS = ("prompt_token_ids", "prompt_lengths", "group", "token_ids", "lengths", "row", "truncated")


@dataclass(eq=False)
class Rollouts(Columns):
    """B completions of Q prompts over the N tokens that the policy drew, without padding.

    Tokens that somebody else wrote are context: the policy sees them, no formula does, and `lengths` does not count
    them. A conversation whose history is rewritten stands here in several consecutive rows with the same `row` index.
    Rewards, advantages and weightings take such pieces as one completion.
    """

    prompt_token_ids: Tensor
    """[sum of prompt lengths] int64, the prompts end to end, each once."""
    prompt_lengths: Tensor
    """[Q] int64, tokens of each prompt, at least 1."""
    group: Tensor
    """[B] int64, index of each completion's prompt."""
    token_ids: Tensor
    """[N] int64, the drawn tokens end to end, stop tokens included."""
    lengths: Tensor
    """[B] int64, the paper's |o_i|: drawn tokens of each row, at least 1."""
    context: Context | None = None
    """Given tokens; None if everything was drawn."""
    row: Tensor = None  # type: ignore[assignment]
    """[B] int64, index of the completion in the exploration step; by default 0, 1, 2, ..."""
    truncated: Tensor = None  # type: ignore[assignment]
    """[B] bool, True for completions cut off at `max_new_tokens`; by default none."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[N] float32 Â, weight, log-probs and more by name: the properties of `Columns`."""
    temperature: float = 1.0
    """log π_θ is the log-softmax of logits / temperature."""
    sizes: Sizes = None  # type: ignore[assignment]
    """Lengths on the host, copied there by default."""

    def __post_init__(self) -> None:
        if self.row is None:
            self.row = torch.arange(len(self.lengths), device=self.lengths.device)
        if self.truncated is None:
            self.truncated = torch.zeros_like(self.lengths, dtype=torch.bool)
        assert self.group.shape == self.lengths.shape == self.row.shape == self.truncated.shape
        if (context := self.context) is not None:
            assert context.position.shape == self.token_ids.shape and context.lengths.shape == self.lengths.shape
        zeros = {name: torch.zeros_like(self.token_ids, dtype=torch.float32) for name in ("advantage", "weight")}
        columns, self.columns = zeros | self.columns, {}
        self.add_columns(columns)
        self.sizes = self.sizes or Sizes.of(self.prompt_lengths, self.group, self.lengths, self.context)

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        group: Sequence[int],
        completions: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[bool]] | None = None,
        **fields: Any,
    ) -> "Rollouts":
        """Rollouts from lists of token ids.

        Args:
            prompts: [Q] token ids of each prompt.
            group: [B] index of each completion's prompt.
            completions: [B] token ids of each completion, drawn and given.
            drawn: [B] True for each token that the policy drew; the others are context. None: it drew all.
            fields: Further arguments of `Rollouts`.
        """
        token_ids, lengths = ragged.flat(completions)
        context = None
        if drawn is not None and drawn != [[True] * len(completion) for completion in completions]:
            token_ids, lengths, context = Context.split(token_ids, lengths, drawn)
        group_of_row = torch.tensor(group, dtype=torch.int64)
        return cls(*ragged.flat(prompts), group_of_row, token_ids, lengths, context, **fields)

    @classmethod
    def concat(cls, batches: Sequence["Rollouts"], num_rows: Sequence[int] | None = None) -> "Rollouts":
        """Several rollouts end to end; a batch without tokens may lack columns that others have.

        `num_rows` is what each batch adds to the `row` of the next ones, by default its length.
        """
        assert len({batch.temperature for batch in batches}) == 1
        fields: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in FIELDS}

        # Indices of rows and of prompts count on from one batch to the next.
        batch_lengths = [len(batch) for batch in batches]
        num_prompts = [len(batch.prompt_lengths) for batch in batches]
        for name, counts in (("row", num_rows or batch_lengths), ("group", num_prompts)):
            offsets = ragged.spread(ragged.starts(torch.tensor(counts)), torch.tensor(batch_lengths))
            fields[name] += offsets.to(fields[name].device)

        names = dict.fromkeys(name for batch in batches for name in batch.columns)
        return cls(
            **fields,
            context=Context.concat([(batch.context, batch.lengths) for batch in batches]),
            columns={name: torch.cat([b.columns[name] for b in batches if name in b.columns]) for name in names},
            temperature=batches[0].temperature,
        )

    def __len__(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def begins(self) -> Tensor:
        """[B] bool, True where a completion begins: consecutive rows of the same `row` are pieces of one."""
        previous_row = torch.cat([self.row.new_full((1,), -2), self.row])[: len(self)]
        return self.row != previous_row

    @property
    def completion(self) -> Tensor:
        """[B] int64, the index of the completion that each row is a piece of."""
        return self.begins.cumsum(0) - 1

    @property
    def whole_lengths(self) -> Tensor:
        """[completions] int64, drawn tokens of each completion, in all of its pieces."""
        return ragged.segment_sum(self.lengths, self.completion, int(self.begins.sum()))

    @property
    def num_tokens(self) -> int:
        """N, the drawn tokens."""
        return len(self.token_ids)

    @property
    def all_token_ids(self) -> Tensor:
        """[sum of prompt lengths + N + M] the tokens of all prompts, then the drawn ones, then the given ones."""
        return torch.cat([self.prompt_token_ids, self.token_ids, *([self.context.ids] if self.context else [])])

    def with_columns(self, columns: Mapping[str, Tensor | None]) -> "Rollouts":
        """The same rollouts with further columns, or with others in place of their own; None takes one away."""
        rollouts = replace(self, columns={**self.columns})
        rollouts.add_columns(columns)
        return rollouts

    def spread(self, values: Tensor) -> Tensor:
        """One value per completion [B] -> one value per token [N]."""
        return ragged.spread(values, self.lengths, self.num_tokens)

    def to(self, device: torch.device | str) -> "Rollouts":
        """Itself if it is on `device` already, else a copy there. `sizes` stay on the host, and dtypes as they are."""
        if self.token_ids.device == torch.device(device):
            return self
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in FIELDS}
        columns = {name: values.to(device) for name, values in self.columns.items()}
        return replace(self, **moved, context=self.context and self.context.to(device), columns=columns)

    def select(self, rows: Tensor) -> "Rollouts":
        """The completions `rows` [r], in that order, with only the prompts that they need."""
        tokens = ragged.take(rows, self.lengths)
        prompts, group = self.group[rows].unique(return_inverse=True)
        return Rollouts(
            self.prompt_token_ids[ragged.take(prompts, self.prompt_lengths)],
            self.prompt_lengths[prompts],
            group,
            self.token_ids[tokens],
            self.lengths[rows],
            row=self.row[rows],
            truncated=self.truncated[rows],
            context=self.context and self.context.select(rows, tokens),
            columns={name: values[tokens] for name, values in self.columns.items()},
            temperature=self.temperature,
        )

    def micro_batches(self, max_tokens: int, by_group: bool = False) -> list["Rollouts"]:
        """The rollouts cut into micro-batches of at most `max_tokens` each; arguments as for `Sizes.packs`."""
        return [self.select(rows.to(self.lengths.device)) for rows in self.sizes.micro_batches(max_tokens, by_group)]
