"""One exploration step's completions as flat, ragged tensors: what every token-level formula works on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths import ragged


@dataclass(slots=True)
class Sizes:
    """How many tokens stand where, on the host: so that laying out a forward pass asks no GPU anything."""

    prompt_lengths: Tensor
    """[Q] int64."""
    group: Tensor
    """[B] int64."""
    lengths: Tensor
    """[B] int64."""

    @property
    def sequence_lengths(self) -> Tensor:
        """[B] tokens of prompt and completion together."""
        return self.prompt_lengths[self.group] + self.lengths


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
        row: [B] int64, the row's index in the exploration step, for messages.
        truncated: [B] bool, whether the completion was cut off at `max_new_tokens`.
        advantage: [N] float32, Â of each token.
        weight: [N] float32, the factor of each token in the objective, fixed before the passes.
        old_logp: [N] float32, log π_old of each token; None where π_old is π_θ at this very update, so the ratio is 1.
        ref_logp: [N] float32, log π_ref of each token; None without a reference.
        sampler_logp: [N] float32, log-prob of each token under the distribution it was drawn from, filters included;
            None where the engine knows none.
        entropy_rank: [N] float32, the fraction of the step's tokens at which π_old has less entropy; None if unused.
        logp_low: [N] float32, log π_θ at or under which the surrogate lets the token be; None without such bounds.
        logp_high: [N] float32, log π_θ at or over which it does.
        temperature: That of the sampling: log π_θ is the log-softmax of the logits over it.
        sizes: The lengths and groups on the host; None copies them.
    """

    layout: Any = None
    """Where the policy's forward puts the tokens; made by the policy, once for all passes over these rollouts."""

    PER_PROMPT = ("prompt_token_ids", "prompt_lengths")
    PER_ROW = ("group", "lengths", "row", "truncated")
    PER_TOKEN = (
        *("token_ids", "advantage", "weight", "old_logp", "ref_logp", "sampler_logp"),
        *("entropy_rank", "logp_low", "logp_high"),
    )

    def __init__(
        self,
        prompt_token_ids: Tensor,
        prompt_lengths: Tensor,
        group: Tensor,
        token_ids: Tensor,
        lengths: Tensor,
        row: Tensor | None = None,
        truncated: Tensor | None = None,
        advantage: Tensor | None = None,
        weight: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        entropy_rank: Tensor | None = None,
        logp_low: Tensor | None = None,
        logp_high: Tensor | None = None,
        temperature: float = 1.0,
        sizes: Sizes | None = None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.prompt_lengths = prompt_lengths
        self.group = group
        self.token_ids = token_ids
        self.lengths = lengths
        self.row = torch.arange(len(lengths), device=lengths.device) if row is None else row
        self.truncated = torch.zeros_like(lengths, dtype=torch.bool) if truncated is None else truncated
        zeros = torch.zeros(len(token_ids), dtype=torch.float32, device=token_ids.device)
        self.advantage = zeros if advantage is None else advantage
        self.weight = zeros if weight is None else weight
        self.old_logp = old_logp
        self.ref_logp = ref_logp
        self.sampler_logp = sampler_logp
        self.entropy_rank = entropy_rank
        self.logp_low = logp_low
        self.logp_high = logp_high
        self.temperature = temperature
        self.sizes = sizes or Sizes(prompt_lengths.cpu(), group.cpu(), lengths.cpu())
        assert group.shape == lengths.shape == self.row.shape == self.truncated.shape
        for name in self.PER_TOKEN[1:]:
            values = getattr(self, name)
            assert values is None or (values.shape == token_ids.shape and values.dtype == torch.float32), name

    @classmethod
    def from_lists(
        cls, prompts: Sequence[Sequence[int]], group: Sequence[int], completions: Sequence[Sequence[int]]
    ) -> "Rollouts":
        """Prompts [Q] and completions [B] as lists of token ids; `group` names each completion's prompt."""
        return cls(
            prompt_token_ids=torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
            group=torch.tensor(group, dtype=torch.int64),
            token_ids=torch.tensor([token for completion in completions for token in completion], dtype=torch.int64),
            lengths=torch.tensor([len(completion) for completion in completions], dtype=torch.int64),
        )

    @classmethod
    def concat(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """Several rollouts end to end, their rows and prompts numbered on."""
        rows = ragged.starts(torch.tensor([len(part) for part in parts]))
        prompts = ragged.starts(torch.tensor([len(part.prompt_lengths) for part in parts]))
        joined: dict[str, Any] = {"row": torch.cat([p.row + int(n) for p, n in zip(parts, rows, strict=True)])}
        joined["group"] = torch.cat([p.group + int(n) for p, n in zip(parts, prompts, strict=True)])
        for name in {*cls.PER_PROMPT, *cls.PER_ROW, *cls.PER_TOKEN} - joined.keys():
            # An empty part may lack what the others have.
            values = [v for part in parts if (v := getattr(part, name)) is not None]
            joined[name] = torch.cat(values) if values else None
        assert len({part.temperature for part in parts}) == 1
        return cls(**joined, temperature=parts[0].temperature)

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

    def spread(self, values: Tensor) -> Tensor:
        """One value per completion [B] -> one value per token [N]."""
        return ragged.spread(values, self.lengths, self.num_tokens)

    def to(self, device: torch.device | str) -> "Rollouts":
        """Itself if it is on `device` already, else a copy with every tensor but the sizes there; dtypes stay."""
        if self.token_ids.device == torch.device(device):
            return self
        names = (*self.PER_PROMPT, *self.PER_ROW, *self.PER_TOKEN)
        moved: dict[str, Any] = {name: None if (v := getattr(self, name)) is None else v.to(device) for name in names}
        return Rollouts(**moved, temperature=self.temperature, sizes=self.sizes)

    def select(self, rows: Tensor) -> "Rollouts":
        """The completions `rows` [r], in that order, with only the prompts they need."""
        tokens = ragged.take(rows, self.lengths)
        groups, group = self.group[rows].unique(return_inverse=True)

        chosen: dict[str, Any] = {name: getattr(self, name)[rows] for name in self.PER_ROW if name != "group"}
        for name in self.PER_TOKEN:
            values = getattr(self, name)
            chosen[name] = None if values is None else values[tokens]
        return Rollouts(
            prompt_token_ids=self.prompt_token_ids[ragged.take(groups, self.prompt_lengths)],
            prompt_lengths=self.prompt_lengths[groups],
            group=group,
            **chosen,
            temperature=self.temperature,
        )

    def packs(self, max_tokens: int, by_group: bool = False) -> list[Tensor]:
        """The rows of packs of at most `max_tokens` each.

        Args:
            max_tokens: Tokens of prompts, completions and padding; 0 sets no limit.
            by_group: Keep groups together, for a policy that shares their prompt, where any prompt has several.
        """
        sizes = self.sizes
        if by_group and len(self) > len(sizes.prompt_lengths):
            lengths = sizes.prompt_lengths.tolist(), sizes.group.tolist(), sizes.lengths.tolist()
            packs = ragged.group_budget(*lengths, max_tokens)
        else:
            packs = ragged.token_budget(sizes.sequence_lengths.tolist(), max_tokens)
        return [torch.tensor(rows, device=self.lengths.device) for rows in packs]

    def split(self, max_tokens: int, by_group: bool = False) -> list["Rollouts"]:
        """The packs of `packs`."""
        return [self.select(rows) for rows in self.packs(max_tokens, by_group)]
