"""Decoding that reads the keys of a prompt once for all rows of its group, and each row's own keys apart.

With o and l a query's output and log-sum-exp over some keys, its output over the prompt's (a) and its own keys (b) is

    o_a + (o_b - o_a) sigmoid(l_b - l_a)
"""

import torch
from torch import Tensor

from grpo_lightning.maths import ragged

SAVED_BYTES = 2**25  # bytes of copies from which sharing is faster, measured on two cores


def is_worth(prompt_tokens: int, max_new_tokens: int, copied_bytes: int, device: torch.device) -> bool:
    """True where sharing is faster than copies: for long prompts on a CPU.

    On a GPU a copy takes one kernel at each position where sharing takes ten.
    """
    return device.type == "cpu" and prompt_tokens >= max_new_tokens and copied_bytes >= SAVED_BYTES


class SharedPrompts:
    """Keys and values of P prompts, and the rows of the cache that go on from each.

    Args:
        layers: Per layer [P, K, W, D] keys and [P, K, W, E] values.
        lengths: [P] int64 tokens of each prompt, at most W.
        prompt: [r] int64 prompt of each row, ascending; every prompt has a row.
    """

    def __init__(self, layers: list[list[Tensor]], lengths: Tensor, prompt: Tensor) -> None:
        self.layers, self.lengths = layers, lengths
        self._deal(prompt)

    def _deal(self, prompt: Tensor) -> None:
        """Notes which rows go on from which prompt."""
        counts = torch.bincount(prompt)
        self.prompt, column = prompt, ragged.positions(counts)
        self.members = prompt.new_zeros(len(counts), int(counts.max()))
        self.members[prompt, column] = torch.arange(len(prompt), device=prompt.device)
        self.place = prompt * self.members.shape[1] + column
        width = self.layers[0][0].shape[2]
        seen = torch.arange(width, device=prompt.device) < self.lengths[:, None]
        self.seen = None if bool(seen.all()) else seen[:, None, None]

    def keep(self, rows: Tensor) -> None:
        """Keeps some rows, and the prompts that they go on from."""
        prompts, prompt = self.prompt[rows].unique_consecutive(return_inverse=True)
        if len(prompts) < len(self.lengths):
            self.lengths = self.lengths[prompts]
            self.layers = [[states[prompts] for states in layer] for layer in self.layers]
        self._deal(prompt)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """[r, H, 1, D], [r, K, S, D], [r, K, S, E] -> [r, H, 1, E]: each row sees its prompt and its own keys."""
        rows, heads, _, size = query.shape
        folded = query.reshape(rows, key.shape[1], -1, size)
        own, own_sum = attended(folded, key, value, None, scaling)
        queries, (keys, values) = folded[self.members].transpose(1, 2), self.layers[layer]  # [P, K, R, H / K, D]
        found, total = attended(queries.flatten(2, 3), keys, values, self.seen, scaling)
        found, total = (each.unflatten(2, queries.shape[2:4]).transpose(1, 2).flatten(0, 1) for each in (found, total))
        output = torch.lerp(found[self.place], own, (own_sum - total[self.place]).sigmoid().to(own.dtype)[..., None])
        return output.reshape(rows, heads, 1, -1)


def attended(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """[n, K, Q, D], [n, K, S, D], [n, K, S, E] -> attention [n, K, Q, E], and its log-sum-exps [n, K, Q].

    `seen` [n, 1, 1, S] is False on keys that nobody sees; each query sees a key.
    """
    if query.dtype != torch.float32:  # Products would round the scores.
        bias = None if seen is None else torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        bias = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, False, attn_mask=bias, scale=scaling)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query * factor) @ key.mT
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weight = scores.sub_(largest).exp_()
    total = weight.sum(-1, keepdim=True)
    return (weight @ value).div_(total), (largest + total.log()).squeeze(-1)
