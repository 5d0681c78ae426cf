"""One exploration step's completions as flat, ragged tensors: what every token-level formula works on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths import ragged
from grpo_lightning.types import UsageError


@dataclass(slots=True)
class Sizes:
    """Lengths and positions on the host, so that laying out a forward pass does not wait for a GPU."""

    prompt_lengths: Tensor
    """[Q] int64."""
    group: Tensor
    """[B] int64."""
    lengths: Tensor
    """[B] int64, drawn tokens alone."""
    context_lengths: Tensor | None = None
    """[B] int64; None if everything was drawn."""
    position: Tensor | None = None
    """[N] int64; None if everything was drawn."""

    @property
    def completion_lengths(self) -> Tensor:
        """[B] tokens of each completion, drawn and given."""
        return self.lengths if self.context_lengths is None else self.lengths + self.context_lengths

    @property
    def sequence_lengths(self) -> Tensor:
        """[B] tokens of prompt and completion together."""
        return self.prompt_lengths[self.group] + self.completion_lengths

    @property
    def drawn(self) -> Tensor:
        """[N] index of each drawn token among the tokens of all completions, end to end."""
        position = ragged.positions(self.lengths) if self.position is None else self.position
        return ragged.spread(ragged.starts(self.completion_lengths), self.lengths) + position

    @property
    def order(self) -> Tensor:
        """[N + M] index of each token of all completions, end to end, among the drawn tokens and then the given."""
        drawn = self.drawn
        order = torch.empty(int(self.completion_lengths.sum()), dtype=torch.int64)
        given = torch.ones_like(order, dtype=torch.bool)
        given[drawn] = False
        order[drawn] = torch.arange(len(drawn))
        order[given] = torch.arange(len(drawn), len(order))
        return order


class Rollouts:
    """B completions of Q prompts, as one flat vector over the N tokens that the policy drew, without padding.

    Tokens that somebody else wrote inside a completion (a tool's answer, an environment's turn) are context. The policy
    sees them, but no formula does: they have no entry in any [N] vector, and `lengths` does not count them.

    A conversation whose history is rewritten stands here in several pieces, one after the other. Each is a row, which
    the policy reads by itself. Rewards, advantages and weightings know completions as a whole.

    Index types are int64, log-probs are in nats. A field is None as long as nobody needs it.

    | field | shape and dtype | meaning | filled by | read by |
    |---|---|---|---|---|
    | `prompt_token_ids` | [sum of prompt lengths] int64 | the prompts end to end, each once | explorer | policy |
    | `prompt_lengths` | [Q] int64 | tokens of each prompt, at least 1 | explorer | policy, packs |
    | `group` | [B] int64 | index of each completion's prompt | explorer | advantages, weightings, policy |
    | `token_ids` | [N] int64 | the drawn tokens end to end, stop tokens included | explorer | policy, prefix tree |
    | `lengths` | [B] int64 | drawn tokens of each row, the paper's length of o_i, at least 1 | explorer | all |
    | `context_ids` | [M] int64 | the given tokens end to end; None: there are none | explorer | policy, prefix tree |
    | `context_lengths` | [B] int64 | given tokens of each completion | explorer | policy, packs |
    | `position` | [N] int64 | index of a drawn token in its completion's drawn and given tokens | explorer | policy |
    | `row` | [B] int64 | index of the completion in the exploration step | explorer, `select` keeps it | all |
    | `truncated` | [B] bool | whether it was cut off at `max_new_tokens` | explorer | mask `Truncated` |
    | `sampler_logp` | [N] float32 | log-prob when drawn, filters included; None: unknown | explorer | corrections |
    | `advantage` | [N] float32 | Â, in units of the advantage estimator | preparation | surrogates |
    | `weight` | [N] float32 | factor in the objective before its correction | preparation | objective |
    | `old_logp` | [N] float32 | log π_old; None: π_old is π_θ, the ratio is 1 | preparation | surrogates, KL |
    | `ref_logp` | [N] float32 | log π_ref; None: no reference | preparation | KL |
    | `columns` | name -> [N] float32 | what one method needs | preparation, from `Surrogate.prepare` | that method |
    | `temperature` | float | log π_θ is the log-softmax of logits / temperature | explorer | policy |
    | `sizes` | on the host | lengths and positions; None copies them | `Rollouts` | policy, packs |

    A plain class on purpose: Lightning's half precision plugins cast every float tensor they find in a batch of the
    usual collections, and log-probs rounded to bfloat16 are worthless.
    """

    layout: Any = None
    """Where the policy's forward puts the tokens; made by the policy, once for all passes over these rollouts."""
    scored: Any = None
    """What the policy's forward gave in the last update of these rollouts, without gradient; None: there was none."""
    updated: bool = False
    """Whether an update was made with these rollouts. One that a stop rule refused or that was not finite was not."""

    PER_PROMPT = ("prompt_token_ids", "prompt_lengths")
    PER_ROW = ("group", "lengths", "row", "truncated", "context_lengths")
    FLOATS = ("advantage", "weight", "old_logp", "ref_logp", "sampler_logp")
    PER_TOKEN = ("token_ids", "position", *FLOATS)
    TENSORS = (*PER_PROMPT, *PER_ROW, *PER_TOKEN, "context_ids")

    def __init__(
        self,
        prompt_token_ids: Tensor,
        prompt_lengths: Tensor,
        group: Tensor,
        token_ids: Tensor,
        lengths: Tensor,
        context_ids: Tensor | None = None,
        context_lengths: Tensor | None = None,
        position: Tensor | None = None,
        row: Tensor | None = None,
        truncated: Tensor | None = None,
        advantage: Tensor | None = None,
        weight: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        columns: dict[str, Tensor] | None = None,
        temperature: float = 1.0,
        sizes: Sizes | None = None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.prompt_lengths = prompt_lengths
        self.group = group
        self.token_ids = token_ids
        self.lengths = lengths
        self.context_ids = context_ids
        self.context_lengths = context_lengths
        self.position = position
        self.row = torch.arange(len(lengths), device=lengths.device) if row is None else row
        self.truncated = torch.zeros_like(lengths, dtype=torch.bool) if truncated is None else truncated
        zeros = torch.zeros(len(token_ids), dtype=torch.float32, device=token_ids.device)
        self.advantage = zeros if advantage is None else advantage
        self.weight = zeros if weight is None else weight
        self.old_logp = old_logp
        self.ref_logp = ref_logp
        self.sampler_logp = sampler_logp
        self.columns: dict[str, Tensor] = {}
        self.add_columns(columns or {})
        self.temperature = temperature
        self.sizes = sizes or Sizes(
            prompt_lengths.cpu(),
            group.cpu(),
            lengths.cpu(),
            None if context_lengths is None else context_lengths.cpu(),
            None if position is None else position.cpu(),
        )
        assert group.shape == lengths.shape == self.row.shape == self.truncated.shape
        assert len({context_ids is None, context_lengths is None, position is None}) == 1, "context is whole or absent"
        assert position is None or position.shape == token_ids.shape
        assert context_lengths is None or context_lengths.shape == lengths.shape
        for name in self.FLOATS:
            values = getattr(self, name)
            assert values is None or (values.shape == token_ids.shape and values.dtype == torch.float32), name

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        group: Sequence[int],
        completions: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[bool]] | None = None,
    ) -> "Rollouts":
        """Rollouts from lists of token ids.

        Args:
            prompts: [Q] token ids of each prompt.
            group: [B] index of each completion's prompt.
            completions: [B] token ids of each completion, drawn and given.
            drawn: [B] whether the policy drew each token of each completion; the others are context. None: it drew all.
        """
        token_ids = torch.tensor([token for completion in completions for token in completion], dtype=torch.int64)
        lengths = torch.tensor([len(completion) for completion in completions], dtype=torch.int64)
        context: dict[str, Any] = {}
        assert drawn is None or [len(flags) for flags in drawn] == lengths.tolist(), "one flag per token"
        if drawn is not None and not all(all(flags) for flags in drawn):
            own = torch.tensor([flag for flags in drawn for flag in flags], dtype=torch.bool)
            own_lengths = ragged.segment_sum(own.long(), ragged.segments(lengths), len(lengths))
            assert int(own_lengths.min()) > 0, "a completion has at least one drawn token"
            context = {"context_ids": token_ids[~own], "context_lengths": lengths - own_lengths}
            context["position"] = ragged.positions(lengths)[own]
            token_ids, lengths = token_ids[own], own_lengths
        return cls(
            prompt_token_ids=torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
            group=torch.tensor(group, dtype=torch.int64),
            token_ids=token_ids,
            lengths=lengths,
            **context,
        )

    @classmethod
    def concat(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """Several rollouts end to end; rows and prompts are numbered on."""
        first_row = ragged.starts(torch.tensor([len(part) for part in parts])).tolist()
        first_prompt = ragged.starts(torch.tensor([len(part.prompt_lengths) for part in parts])).tolist()
        fields = [{name: getattr(part, name) for name in cls.TENSORS} for part in parts]
        for part, own, row, prompt in zip(parts, fields, first_row, first_prompt, strict=True):
            own |= {"row": part.row + row, "group": part.group + prompt}
        if any(part.context_ids is not None for part in parts):
            for part, own in zip(parts, fields, strict=True):
                if part.context_ids is None:
                    own["context_lengths"] = torch.zeros_like(part.lengths)
                    own["position"] = ragged.positions(part.lengths)
        assert len({part.temperature for part in parts}) == 1
        return cls(
            **{name: joined([own[name] for own in fields]) for name in cls.TENSORS},  # type: ignore[arg-type]
            columns={
                name: torch.cat([part.columns[name] for part in parts if name in part.columns])
                for name in dict.fromkeys(name for part in parts for name in part.columns)
            },
            temperature=parts[0].temperature,
        )

    def __len__(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def begins(self) -> Tensor:
        """[B] bool, whether a completion begins here. Rows in a row of the same `row` are pieces of one completion."""
        before = torch.cat([self.row.new_full((1,), -2), self.row])[: len(self)]
        return self.row != before

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
        given = [] if self.context_ids is None else [self.context_ids]
        return torch.cat([self.prompt_token_ids, self.token_ids, *given])

    def add_columns(self, columns: dict[str, Tensor]) -> None:
        """Keeps what a method prepared: a name and one float32 number per drawn token for each column."""
        for name, values in columns.items():
            if values.shape != self.token_ids.shape or values.dtype != torch.float32:
                found = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
                raise UsageError(f"column {name!r} of the rollouts is {found}: give float32 [{self.num_tokens}]")
        self.columns |= columns

    def spread(self, values: Tensor) -> Tensor:
        """One value per completion [B] -> one value per token [N]."""
        return ragged.spread(values, self.lengths, self.num_tokens)

    def to(self, device: torch.device | str) -> "Rollouts":
        """Itself if it is on `device` already, else a copy with every tensor but the sizes there; dtypes stay."""
        if self.token_ids.device == torch.device(device):
            return self
        moved: dict[str, Any] = {
            name: None if (values := getattr(self, name)) is None else values.to(device) for name in self.TENSORS
        }
        columns = {name: values.to(device) for name, values in self.columns.items()}
        return Rollouts(**moved, columns=columns, temperature=self.temperature, sizes=self.sizes)

    def select(self, rows: Tensor) -> "Rollouts":
        """The completions `rows` [r], in that order, with only the prompts they need."""
        tokens = ragged.take(rows, self.lengths)
        groups, group = self.group[rows].unique(return_inverse=True)
        chosen: dict[str, Any] = {}
        for names, index in ((self.PER_ROW, rows), (self.PER_TOKEN, tokens)):
            for name in names:
                values = getattr(self, name)
                chosen[name] = None if values is None else values[index]
        if self.context_ids is not None and self.context_lengths is not None:
            chosen["context_ids"] = self.context_ids[ragged.take(rows, self.context_lengths)]
        return Rollouts(
            prompt_token_ids=self.prompt_token_ids[ragged.take(groups, self.prompt_lengths)],
            prompt_lengths=self.prompt_lengths[groups],
            **chosen | {"group": group},
            columns={name: values[tokens] for name, values in self.columns.items()},
            temperature=self.temperature,
        )

    def rows_of_packs(self, max_tokens: int, by_group: bool = False) -> list[Tensor]:
        """The rows of packs of at most `max_tokens` each.

        Args:
            max_tokens: Tokens of prompts, completions with their context, and padding; 0 sets no limit.
            by_group: Keep groups together, for a policy that shares their prompt, where any prompt has several.
        """
        sizes = self.sizes
        if by_group and len(self) > len(sizes.prompt_lengths):
            lengths = sizes.prompt_lengths.tolist(), sizes.group.tolist(), sizes.completion_lengths.tolist()
            packs = ragged.group_budget(*lengths, max_tokens)
        else:
            packs = ragged.token_budget(sizes.sequence_lengths.tolist(), max_tokens)
        return [torch.tensor(rows, device=self.lengths.device) for rows in packs]

    def packs(self, max_tokens: int, by_group: bool = False) -> list["Rollouts"]:
        """The rollouts cut into packs of at most `max_tokens` each; arguments as for `rows_of_packs`."""
        return [self.select(rows) for rows in self.rows_of_packs(max_tokens, by_group)]


def joined(values: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors among `values` end to end; None if there are none. Empty rollouts may lack what others have."""
    present = [value for value in values if value is not None]
    return torch.cat(present) if present else None
