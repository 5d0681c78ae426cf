"""Images through a model's own encoder: what the model as a whole hands to its decoder of text."""

import hashlib
from collections.abc import Mapping
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_lightning.maths.images import decoder_inputs
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.architecture import Head, trunk_of
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import ImageStates, PromptImages, UsageError


class _AtDecoder(Exception):
    """Ends a forward pass where the decoder would begin."""


class Pixels(PromptImages):
    """The images of a prompt as a processor has prepared them.

    Args:
        inputs: The arguments of the model beside `input_ids`.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.inputs = inputs
        self.key = key_of(inputs)

    def states(self, model: PreTrainedModel, prompt_ids: Tensor, tries: bool = False) -> ImageStates:
        """Returns what the decoder of `model` reads of the images, with gradient where gradients are on.

        Args:
            model: A model that sees. Its encoder is called once.
            prompt_ids: [P] token ids of the prompt.
            tries: Raise UsageError unless the decoder computes with these states what the model as a whole computes.
        """
        arguments, logits = _decoder_arguments(model, prompt_ids, self.inputs, stops=not tries)
        decoder: Any = trunk_of(model)
        embed = decoder.get_input_embeddings()
        states = arguments["inputs_embeds"][0]
        # Image tokens are those at which the decoder reads something else than an embedding.
        with torch.no_grad():
            text_states = embed(prompt_ids.clamp(max=embed.num_embeddings - 1)).to(states.dtype)
            index = (states != text_states).any(-1).nonzero().squeeze(1)
        positions = arguments.get("position_ids")
        result = ImageStates(
            index=index.cpu(),
            states=states[index],
            images=self,
            layers=tuple(arguments.get("deepstack_visual_embeds") or ()),
            # Some models put the positions of text before the three others.
            positions=positions[-3:, 0].cpu() if positions is not None and positions.ndim == 3 else None,
        )
        if tries:
            _check(model, prompt_ids, result, arguments.get("attention_mask"), logits.float())
        return result


def key_of(pixels: Mapping[str, Tensor]) -> str:
    """Returns a text that is equal for equal images alone."""
    digest = hashlib.sha256()
    for name, value in pixels.items():
        digest.update(
            f"{name}{[*value.shape]}".encode() + value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def _decoder_arguments(
    model: PreTrainedModel, prompt_ids: Tensor, pixels: Mapping[str, Tensor], stops: bool
) -> tuple[dict[str, Any], Any]:
    """Returns the arguments with which the forward of `model` calls its decoder, and the logits unless it `stops`.

    The forward is followed up to the decoder, so that a model does with images whatever its own code does.
    """
    arguments: dict[str, Any] = {}
    thread = get_ident()

    def capture(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        # Another thread may pass other rows through the decoder.
        if get_ident() == thread:
            arguments.update(kwargs)
            if stops:
                raise _AtDecoder

    parameter = next(model.parameters())
    inputs = {
        name: value.to(parameter) if value.is_floating_point() else value.to(parameter.device)
        for name, value in pixels.items()
    }
    logits = None
    hook = trunk_of(model).register_forward_pre_hook(capture, with_kwargs=True)
    try:
        logits = model(input_ids=prompt_ids[None], use_cache=False, **inputs).logits
    except _AtDecoder:
        pass
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Models raise exceptions of any class, also if they have no encoder.
        raise UsageError(f"{type(model).__name__} cannot read the images of a prompt ({first_line(error)})") from error
    finally:
        hook.remove()
    return arguments, logits


def _check(model: PreTrainedModel, prompt_ids: Tensor, states: ImageStates, mask: Any, expected: Tensor) -> None:
    """Raises UsageError if the decoder computes something else than `expected`, the logits of the model as a whole.

    Args:
        model: The model.
        prompt_ids: [P] token ids of the prompt.
        states: The images of the prompt.
        mask: The mask with which the model called its decoder; several by kind of layer, or None.
        expected: [1, P, V] float32 logits.
    """
    refusal = f"{type(model).__name__} cannot be trained on images"
    for layer_mask in mask.values() if isinstance(mask, Mapping) else [mask]:
        if isinstance(layer_mask, Tensor) and layer_mask.ndim == 4:
            is_visible = layer_mask if layer_mask.dtype == torch.bool else layer_mask == 0
            if is_visible.triu(1).any():
                raise UsageError(f"{refusal}: its image tokens see later ones; use a causal model, such as Qwen3-VL")
    prompt = Rollouts.from_lists([prompt_ids.tolist()], [], [], image_states=[states])
    trunk = trunk_of(model)
    tokens = torch.arange(len(prompt_ids), device=prompt_ids.device)[None]
    inputs = decoder_inputs(trunk, prompt_ids[None], tokens, prompt)
    logits = Head(model)(trunk(**inputs, use_cache=False).last_hidden_state)
    difference = float((logits - expected).abs().max())
    tolerance = 1e-3 if logits.dtype == states.states.dtype == torch.float32 else 0.2
    # Written with `not`, so that NaN is refused too.
    if not difference <= tolerance:
        raise UsageError(f"{refusal}: its logits would be off by {difference:.2g}; use another model, and report it")
