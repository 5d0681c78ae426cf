"""Images in prompts, as a decoder reads them: states in place of the embeddings of image tokens."""

from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths import ragged
from grpo_lightning.maths.rollouts import Rollouts


def decoder_inputs(decoder: Any, ids: Tensor, tokens: Tensor, rollouts: Rollouts) -> dict[str, Any]:
    """Returns the arguments of a decoder that replace [B, T] `ids`, where some prompts of `rollouts` have images.

    Args:
        decoder: The decoder of text; its token embedding is called.
        ids: Token ids with padding.
        tokens: [B, T] index of each token in `Rollouts.all_token_ids`. Padding has any index, or the next one.
        rollouts: Prompts, and their completions if there are any.
    """
    device = ids.device
    sizes = rollouts.sizes
    starts = ragged.starts(sizes.prompt_lengths).tolist()
    with_images = [(images, start) for images, start in zip(rollouts.image_states, starts, strict=True) if images]

    # The index of each token's image state; -1 for tokens of text and for padding.
    index = torch.cat([images.index + start for images, start in with_images])
    num_tokens = int(sizes.prompt_lengths.sum() + sizes.completion_lengths.sum())
    state_of_token = torch.full((num_tokens + 1,), -1)
    state_of_token[index] = torch.arange(len(index))
    state_of_id = state_of_token.to(device)[tokens]
    is_image = state_of_id >= 0

    # An image token may have an id that the embedding lacks.
    embeddings = decoder.get_input_embeddings()(ids.masked_fill(is_image, 0))
    states = torch.cat([images.states for images, _ in with_images]).to(device, embeddings.dtype)
    inputs: dict[str, Any] = {"input_ids": None}
    inputs["inputs_embeds"] = torch.where(is_image[..., None], states[state_of_id], embeddings)

    if with_images[0][0].layers:
        inputs["visual_pos_masks"] = is_image
        inputs["deepstack_visual_embeds"] = [
            torch.cat(layer).to(states)[state_of_id[is_image]]
            for layer in zip(*(images.layers for images, _ in with_images), strict=True)
        ]

    if with_images[0][0].positions is not None:
        # A completion goes on at the position after its prompt.
        ahead = torch.tensor([images.ahead if images else 0 for images in rollouts.image_states])
        first_positions = (sizes.prompt_lengths + ahead)[sizes.group]
        lengths = sizes.completion_lengths
        of_completions = ragged.per_element(first_positions, lengths) + ragged.positions(lengths)
        of_completions = torch.empty_like(of_completions).index_copy_(0, sizes.order, of_completions)
        of_padding = torch.zeros(1, dtype=torch.int64)
        positions = torch.cat([ragged.positions(sizes.prompt_lengths), of_completions, of_padding]).repeat(3, 1)
        for images, start in with_images:
            assert images.positions is not None
            positions[:, start : start + images.positions.shape[1]] = images.positions
        inputs["position_ids"] = positions.to(device)[:, tokens]
    return inputs
