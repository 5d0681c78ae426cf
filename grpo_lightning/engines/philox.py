"""Counter-based random numbers: the number for (seed, step, prompt, sample, position) is a pure function of them.

So a completion does not depend on its batch, on the order of the prompts, on the number of ranks, or on a resume.
Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import torch
from torch import Tensor

from grpo_lightning.types import RandomKey

_MASK = 0xFFFFFFFF
WORDS = 4


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four int64 tensors of 32-bit words: four such tensors, which broadcast, after ten rounds with `key`."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2^64, which leaves their 64 bits right; the masks undo the sign.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniforms(key: RandomKey, prompt_id: Tensor, sample: Tensor, start: Tensor, count: int) -> Tensor:
    """[B, count] float32 uniform numbers in [0, 1) for `count` positions of each completion.

    Args:
        key: Seed of the run and exploration step.
        prompt_id: [B] int64 id of each completion's prompt.
        sample: [B] int64 index of each completion in its group.
        start: [B] int64 position of each completion's first token.
        count: Number of positions.
    """
    # One block holds the numbers of `WORDS` positions; a completion may begin inside a block.
    num_blocks = (count + 2 * WORDS - 2) // WORDS
    blocks = (start // WORDS)[:, None] + torch.arange(num_blocks, device=prompt_id.device)
    counter = (blocks, sample[:, None], (prompt_id & _MASK)[:, None], ((prompt_id >> 32) & _MASK)[:, None])
    words = torch.stack(philox(counter, (key.seed & _MASK, key.step & _MASK)), dim=-1).flatten(1)
    word_index = (start % WORDS)[:, None] + torch.arange(count, device=prompt_id.device)
    # The upper 24 bits are exact in float32.
    return (words.gather(1, word_index) >> 8).float() * 2.0**-24
