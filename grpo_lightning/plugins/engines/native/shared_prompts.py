"""Decoding that reads the keys of a prompt once for all rows of its group.

A query attends twice: to the keys of the prompt (a), and to the keys of its completion (b). With o and l its output and
log-sum-exp over some keys, its output over both is

    o_a + (o_b - o_a) sigmoid(l_b - l_a)
"""

import torch
from torch import Tensor

from grpo_lightning.maths import ragged

SAVED_BYTES = 2**25
"""Bytes of copies from which sharing is faster, measured on two cores."""


def is_worth(prompt_tokens: int, max_new_tokens: int, copied_bytes: int, device: torch.device) -> bool:
    """Returns whether sharing is faster than copies: for long prompts on a CPU.

    On a GPU decoding with copies takes one kernel per position and layer, and with sharing ten.
    """
    return device.type == "cpu" and prompt_tokens >= max_new_tokens and copied_bytes >= SAVED_BYTES


class SharedPrompts:
    """Keys and values of P prompts, and the rows of the cache that continue each prompt.

    Args:
        layers: Per layer [P, K, W, D] keys and [P, K, W, E] values.
        lengths: [P] int64 tokens of each prompt, at most W.
        prompt_of_row: [r] int64 prompt of each row, ascending; every prompt has a row.
    """

    def __init__(self, layers: list[list[Tensor]], lengths: Tensor, prompt_of_row: Tensor) -> None:
        self.layers = layers
        self.lengths = lengths
        self._index(prompt_of_row)

    def _index(self, prompt_of_row: Tensor) -> None:
        """Computes the indices between rows and slots. With R the rows of the largest group, P prompts have P R."""
        group_sizes = torch.bincount(prompt_of_row)
        column = ragged.positions(group_sizes)
        self.prompt_of_row = prompt_of_row
        self.row_of_slot = prompt_of_row.new_zeros(len(group_sizes), int(group_sizes.max()))
        """[P, R] row in each slot of a prompt; any row in slots beyond the size of its group."""
        self.row_of_slot[prompt_of_row, column] = torch.arange(len(prompt_of_row), device=prompt_of_row.device)
        self.slot_of_row = prompt_of_row * self.row_of_slot.shape[1] + column
        """[r] slot of each row, counted over all prompts."""
        width = self.layers[0][0].shape[2]
        is_token = torch.arange(width, device=prompt_of_row.device) < self.lengths[:, None]
        self.is_token = None if bool(is_token.all()) else is_token[:, None, None]
        """[P, 1, 1, W] bool, False on padding; None without padding."""

    def keep(self, rows: Tensor) -> None:
        """Keeps some rows, and the prompts that these rows continue."""
        prompts, prompt_of_row = self.prompt_of_row[rows].unique_consecutive(return_inverse=True)
        if len(prompts) < len(self.lengths):
            self.lengths = self.lengths[prompts]
            self.layers = [[states[prompts] for states in layer] for layer in self.layers]
        self._index(prompt_of_row)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """[r, H, 1, D], [r, K, S, D], [r, K, S, E] -> [r, H, 1, E]: each row sees its prompt and its completion."""
        rows, heads, _, size = query.shape
        folded = query.reshape(rows, key.shape[1], -1, size)
        over_completion, completion_lse = attended(folded, key, value, None, scaling)

        # [P, K, R, H / K, D] queries by slot; all queries of a prompt meet its keys in one product.
        queries = folded[self.row_of_slot].transpose(1, 2)
        prompt_keys, prompt_values = self.layers[layer]
        over_prompt, prompt_lse = (
            tensor.unflatten(2, queries.shape[2:4]).transpose(1, 2).flatten(0, 1)[self.slot_of_row]
            for tensor in attended(queries.flatten(2, 3), prompt_keys, prompt_values, self.is_token, scaling)
        )

        share = (completion_lse - prompt_lse).sigmoid().to(over_completion.dtype)[..., None]
        return torch.lerp(over_prompt, over_completion, share).reshape(rows, heads, 1, -1)


def attended(
    query: Tensor, key: Tensor, value: Tensor, is_visible: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """[n, K, Q, D], [n, K, S, D], [n, K, S, E] -> attention [n, K, Q, E], and its log-sum-exps [n, K, Q].

    `is_visible` [n, 1, 1, S] is False on keys that no query sees; each query sees at least one key.
    """
    # In 16 bits the products below would round the scores; this kernel does not.
    if query.dtype != torch.float32:
        bias = None
        if is_visible is not None:
            bias = torch.zeros_like(is_visible, dtype=query.dtype).masked_fill_(~is_visible, -torch.inf)
            bias = bias.expand(-1, -1, query.shape[2], -1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, False, attn_mask=bias, scale=scaling)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query * factor) @ key.mT
    if is_visible is not None:
        scores.masked_fill_(~is_visible, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weight = scores.sub_(largest).exp_()
    total = weight.sum(-1, keepdim=True)
    return (weight @ value).div_(total), (largest + total.log()).squeeze(-1)
