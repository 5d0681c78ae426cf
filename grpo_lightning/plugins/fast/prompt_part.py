"""Attention of decoded rows in two parts: to the keys of their prompt, once per group, and to each row's own keys.

The softmax of both is found from those of the parts, by the logarithms of their sums (`merged`). So the prompt's keys
and values are neither copied to the rows nor read once per row.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning.maths import ragged

SAVED_BYTES = 2**22
"""Bytes of copied keys and values of one layer from which two parts are faster than one: measured on 2 cores."""


@dataclass(slots=True)
class Groups:
    """Which rows of the cache go on from which prompt."""

    members: Tensor
    """[P, R] int64 rows of each of P prompts; any row where a prompt has fewer than R."""
    prompt: Tensor
    """[r] int64 prompt of each row, ascending."""
    position: Tensor
    """[r] int64 column of each row in `members`."""
    hidden: Tensor | None
    """[P, 1, W] bool, True on the padding of prompts shorter than the longest; None without any."""
    indices: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """What `index` has made, by key heads."""

    @classmethod
    def of(cls, prompt: Tensor, num_prompts: int, hidden: Tensor | None) -> "Groups":
        """Groups of rows in the order of their prompts; each prompt has a row at least."""
        counts = torch.bincount(prompt, minlength=num_prompts)
        position, width = ragged.positions(counts), int(counts.max())
        members = prompt.new_zeros(num_prompts, width)
        members[prompt, position] = torch.arange(len(prompt), device=prompt.device)
        return cls(members, prompt, position, hidden)

    def keep(self, rows: Tensor) -> tuple[Tensor, "Groups"]:
        """The prompts [p] that `rows` go on from, and the groups of these rows and prompts alone."""
        prompts, prompt = self.prompt[rows].unique_consecutive(return_inverse=True)
        return prompts, Groups.of(prompt, len(prompts), None if self.hidden is None else self.hidden[prompts])

    def index(self, key_heads: int) -> tuple[Tensor, Tensor]:
        """Where the queries of [r, K] rows and key heads come from and go to in [P, K, R], both flat."""
        if key_heads not in self.indices:
            head = torch.arange(key_heads, device=self.prompt.device)
            sources = self.members[:, None] * key_heads + head[:, None]
            targets = (self.prompt[:, None] * key_heads + head) * self.members.shape[1] + self.position[:, None]
            self.indices[key_heads] = sources.flatten(), targets.flatten()
        return self.indices[key_heads]


@dataclass(slots=True)
class PromptPart:
    """The keys and values of all prompts in one layer."""

    keys: Tensor
    """[P, K, W, D]."""
    values: Tensor
    """[P, K, W, E]."""
    groups: Groups
    """The same in all layers."""

    def keep(self, prompts: Tensor, groups: Groups) -> "PromptPart":
        """Those of the prompts [p] alone, which `groups` knows by their new indices."""
        if len(prompts) == len(self.keys):
            return PromptPart(self.keys, self.values, groups)
        return PromptPart(self.keys.index_select(0, prompts), self.values.index_select(0, prompts), groups)


def is_worth(keys: Tensor, rows: int) -> bool:
    """Whether attention in two parts is faster for so many rows after prompts with these keys [P, K, W, D].

    On a CPU. Elsewhere copies take one kernel where two parts take ten, which a GPU waits for.
    """
    copied = keys[0].numel() * (rows - len(keys))
    return keys.device.type == "cpu" and 2 * copied * keys.element_size() >= SAVED_BYTES


def in_two_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, prompts: PromptPart
) -> Tensor:
    """[r, H, 1, D], [r, K, S, D], [r, K, S, E] -> [r, H, 1, E]: each row sees its prompt and its own keys.

    Args:
        query: Of one new token per row.
        key: The rows' own.
        value: The rows' own.
        mask: [r, 1, 1, S] bool, which of its own keys a row sees; None sees all.
        scaling: Factor of the scores; None is 1 / sqrt(D).
        prompts: The prompts' keys and values.
    """
    rows, heads, _, size = query.shape
    key_heads = key.shape[1]
    sources, targets = prompts.groups.index(key_heads)
    flat = query.reshape(rows * key_heads, -1)
    hidden = None if mask is None else ~mask[:, 0]
    own, own_sum = part(flat.view(rows, key_heads, -1, size), key, value, hidden, scaling)
    num_prompts = len(prompts.keys)
    gathered = flat.index_select(0, sources).view(num_prompts, key_heads, -1, size)
    output, log_sum = part(gathered, prompts.keys, prompts.values, prompts.groups.hidden, scaling)
    output = output.reshape(len(sources), -1).index_select(0, targets).view_as(own)
    log_sum = log_sum.reshape(len(sources), -1).index_select(0, targets).view_as(own_sum)
    return merged(own, own_sum, output, log_sum).view(rows, heads, 1, -1)


def merged(left: Tensor, left_sum: Tensor, right: Tensor, right_sum: Tensor) -> Tensor:
    """[..., E] the attention to two sets of keys, from that to each and the logarithms [...] of its sums.

    With sums a and b the weights are a / (a + b) and b / (a + b), the logistic function of log a - log b.
    """
    return torch.lerp(left, right, torch.sigmoid(right_sum - left_sum).to(left.dtype)[..., None])


def part(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention [n, K, Q, E] of [n, K, Q, D] to [n, K, S, D], and the logarithms [n, K, Q] of its sums.

    Args:
        query: Queries of each key head.
        key: The keys.
        value: The values.
        hidden: [n, 1, S] bool, True on keys that are not seen; every query sees a key.
        scaling: Factor of the scores; None is 1 / sqrt(D).
    """
    if takes_products(query):
        scores = _scores(query, key, hidden, scaling)
        probability = scores.softmax(-1)
        # p = exp(score) / sum, for the largest of each row, where p rounds least.
        log_sum = scores.amax(-1) - probability.amax(-1).log()
        output = torch.bmm(probability, value.flatten(0, 1))
        return output.view(*query.shape[:-1], -1), log_sum.view(query.shape[:-1])
    bias = None
    if hidden is not None:
        bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
        bias = bias[:, None].expand(-1, -1, query.shape[2], -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scaling
    )


def takes_products(query: Tensor) -> bool:
    """Whether plain products are best: in float32 on a CPU, where flash attention takes few queries slowly.

    In fewer bits the scores would be rounded, which flash attention does not.
    """
    return query.device.type == "cpu" and query.dtype == torch.float32


def of_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None) -> Tensor:
    """As `grpo_lightning.plugins.fast.attention.masked` for one new token per row, by plain products."""
    rows, heads, _, size = query.shape
    folded = query.reshape(rows, key.shape[1], -1, size)
    hidden = None if mask is None else ~mask[:, 0]
    probability = _scores(folded, key, hidden, scaling).softmax(-1)
    return torch.bmm(probability, value.flatten(0, 1)).view(rows, heads, 1, -1)


def _scores(query: Tensor, key: Tensor, hidden: Tensor | None, scaling: float | None) -> Tensor:
    """[n * K, Q, S] scores, -inf where `hidden` [n or 1, 1, S]."""
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    # A view of the slab stays one: its rows and heads are a constant stride apart.
    scores = torch.bmm((query * factor).flatten(0, 1), key.flatten(0, 1).mT)
    if hidden is not None:
        scores.view(*query.shape[:2], *scores.shape[1:]).masked_fill_(hidden[:, None], -torch.inf)
    return scores
