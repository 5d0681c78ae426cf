"""The record of an exploration step: its completions, as flat vectors over the tokens that the policy sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths import ragged
from grpo_lightning.maths.columns import Columns
from grpo_lightning.maths.sizes import Context, Sizes
from grpo_lightning.types import ImageStates

FIELDS = ("prompt_token_ids", "prompt_lengths", "group", "token_ids", "lengths", "sample_index", "truncated")
"""The fields that are one tensor. `columns` holds the numbers of each token, and `context` the other tokens."""


@dataclass(eq=False)
class Rollouts(Columns):
    """B completions of Q prompts, over the N tokens that the policy sampled, without padding.

    A row is a prompt with tokens after it, as the model reads them. A completion is one row. Only a conversation whose
    history was rewritten is several consecutive rows, with the same `sample_index`. Rewards, advantages and weightings
    treat these rows as one completion.

    Tokens that a tool or an environment wrote are context: the policy reads them, but no formula does, and `lengths`
    does not count them.
    """

    prompt_token_ids: Tensor
    """[sum of prompt lengths] int64, the tokens of the prompts end to end, each prompt once."""
    prompt_lengths: Tensor
    """[Q] int64, the number of tokens of each prompt, at least 1."""
    group: Tensor
    """[B] int64, the index of each row's prompt."""
    token_ids: Tensor
    """[N] int64, the sampled tokens end to end, stop tokens included."""
    lengths: Tensor
    """[B] int64, the paper's |o_i|: the number of sampled tokens of each row, at least 1."""
    context: Context | None = None
    """The context tokens; None if every token was sampled."""
    sample_index: Tensor = None  # type: ignore[assignment]
    """[B] int64, the index of each row's sample among the samples of the step; by default 0, 1, 2, ...

    -1 marks an idle row, which has no sample and weight 0: it fills up a rank with less to do.
    """
    truncated: Tensor = None  # type: ignore[assignment]
    """[B] bool, True for completions that were cut off at `max_new_tokens`; by default all False."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[N] float32 numbers of each token by name: Â, weight, log-probs (see `Columns`), and what a method adds."""
    temperature: float = 1.0
    """log π_θ is the log-softmax of logits / temperature."""
    sizes: Sizes = None  # type: ignore[assignment]
    """The lengths as numbers on the CPU, copied there by default, so that a GPU is not waited for."""
    image_states: Sequence[ImageStates | None] = ()
    """[Q] what the model reads of the images of each prompt; empty if no prompt has images."""

    def __post_init__(self) -> None:
        if self.sample_index is None:
            self.sample_index = torch.arange(len(self.lengths), device=self.lengths.device)
        if self.truncated is None:
            self.truncated = torch.zeros_like(self.lengths, dtype=torch.bool)
        assert self.group.shape == self.lengths.shape == self.sample_index.shape == self.truncated.shape
        if (context := self.context) is not None:
            assert context.position.shape == self.token_ids.shape and context.lengths.shape == self.lengths.shape

        if not any(self.image_states):
            self.image_states = ()

        # Â and weight always exist.
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
        is_sampled: Sequence[Sequence[bool]] | None = None,
        **fields: Any,
    ) -> "Rollouts":
        """Makes rollouts of lists of token ids.

        Args:
            prompts: [Q] token ids of each prompt.
            group: [B] index of each completion's prompt.
            completions: [B] token ids of each completion, sampled tokens and context.
            is_sampled: [B] a flag per token, True if the policy sampled it; other tokens are context. None: it sampled
                all tokens.
            fields: Further arguments of `Rollouts`.
        """
        token_ids, lengths = ragged.flat(completions)
        context = None
        if is_sampled is not None and is_sampled != [[True] * len(completion) for completion in completions]:
            token_ids, lengths, context = Context.split(token_ids, lengths, is_sampled)
        group_of_row = torch.tensor(group, dtype=torch.int64)
        return cls(*ragged.flat(prompts), group_of_row, token_ids, lengths, context, **fields)

    @classmethod
    def concat(cls, batches: Sequence["Rollouts"], num_samples: Sequence[int] | None = None) -> "Rollouts":
        """Concatenates rollouts. A batch without tokens may lack columns that other batches have.

        Args:
            batches: Rollouts of different prompts, sampled at one temperature.
            num_samples: The number of samples of each batch: `sample_index` counts on from batch to batch. By default
                every row is a sample.
        """
        assert len({batch.temperature for batch in batches}) == 1
        fields: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in FIELDS}

        # Indices of samples and of prompts count on from one batch to the next.
        batch_lengths = [len(batch) for batch in batches]
        num_prompts = [len(batch.prompt_lengths) for batch in batches]
        for name, counts in (("sample_index", num_samples or batch_lengths), ("group", num_prompts)):
            offsets = ragged.per_element(ragged.starts(torch.tensor(counts)), torch.tensor(batch_lengths))
            fields[name] += offsets.to(fields[name].device)

        names = dict.fromkeys(name for batch in batches for name in batch.columns)
        states_by_batch = [batch.image_states or [None] * len(batch.prompt_lengths) for batch in batches]
        return cls(
            **fields,
            context=Context.concat([(batch.context, batch.lengths) for batch in batches]),
            columns={name: torch.cat([b.columns[name] for b in batches if name in b.columns]) for name in names},
            temperature=batches[0].temperature,
            image_states=[states for batch_states in states_by_batch for states in batch_states],
        )

    def __len__(self) -> int:
        """Returns B, the number of rows."""
        return len(self.lengths)

    @property
    def is_first_row(self) -> Tensor:
        """[B] bool, True for the first row of each completion."""
        # A row is the first of its completion if the row before it has another index. Row 0 has no row before it: -2,
        # which is no index, stands there.
        return self.sample_index.diff(prepend=self.sample_index.new_full((1,), -2)) != 0

    @property
    def completion_of_row(self) -> Tensor:
        """[B] int64, the index of each row's completion among the completions in this record."""
        return self.is_first_row.cumsum(0) - 1

    @property
    def lengths_by_completion(self) -> Tensor:
        """[completions] int64, the number of sampled tokens of each completion, in all of its rows."""
        return ragged.segment_sum(self.lengths, self.completion_of_row, int(self.is_first_row.sum()))

    @property
    def num_tokens(self) -> int:
        """N, the number of sampled tokens."""
        return len(self.token_ids)

    @property
    def all_token_ids(self) -> Tensor:
        """[all tokens] int64, end to end: first all prompts, then all sampled tokens, then all context tokens."""
        return torch.cat([self.prompt_token_ids, self.token_ids, *([self.context.ids] if self.context else [])])

    @property
    def row(self) -> Tensor:
        """[rows] `sample_index`, by its name in 0.2, for methods in users' files."""
        return self.sample_index

    def with_columns(self, columns: Mapping[str, Tensor | None]) -> "Rollouts":
        """Returns a copy with these columns added or replaced; None removes a column."""
        rollouts = replace(self, columns={**self.columns})
        rollouts.add_columns(columns)
        return rollouts

    def per_token(self, values: Tensor) -> Tensor:
        """Repeats one value per row [B] for each of its tokens: [N]."""
        return ragged.per_element(values, self.lengths, self.num_tokens)

    spread = per_token  # its name in 0.2, for methods in users' files

    def to(self, device: torch.device | str) -> "Rollouts":
        """Returns a copy on `device`, or these rollouts if they are there. `sizes` stay on the CPU."""
        if self.token_ids.device == torch.device(device):
            return self
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in FIELDS}
        columns = {name: values.to(device) for name, values in self.columns.items()}
        return replace(self, **moved, context=self.context and self.context.to(device), columns=columns)

    def select(self, rows: Tensor) -> "Rollouts":
        """Returns the rows with the indices `rows` [r], in that order, and their prompts alone."""
        # `ragged.take` returns the indices of the tokens of these rows.
        tokens = ragged.take(rows, self.lengths)
        prompts, group = self.group[rows].unique(return_inverse=True)
        return Rollouts(
            self.prompt_token_ids[ragged.take(prompts, self.prompt_lengths)],
            self.prompt_lengths[prompts],
            group,
            self.token_ids[tokens],
            self.lengths[rows],
            sample_index=self.sample_index[rows],
            truncated=self.truncated[rows],
            context=self.context and self.context.select(rows, tokens),
            columns={name: values[tokens] for name, values in self.columns.items()},
            temperature=self.temperature,
            image_states=self.image_states and [self.image_states[index] for index in prompts.tolist()],
        )

    def micro_batches(self, max_tokens: int, by_group: bool = False) -> list["Rollouts"]:
        """Cuts the rollouts into micro-batches of at most `max_tokens` tokens each.

        A row that is longer is a micro-batch by itself. With `by_group`, the rows of a group stay together where they
        fit, and count their prompt once.
        """
        return [self.select(rows.to(self.lengths.device)) for rows in self.sizes.micro_batches(max_tokens, by_group)]
