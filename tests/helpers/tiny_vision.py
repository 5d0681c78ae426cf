"""Tiny random models that see, of several families, with their processors; and prompts with images."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

from grpo_lightning import Policy, Prompt, Question
from helpers.tiny import randomised
from tools.make_tiny_policy import make_tokenizer

hf.logging.set_verbosity_error()

HIDDEN, HEADS = 32, 4
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIDE = 32
"""Pixels per side of an image."""


class Family(NamedTuple):
    """A model that sees, random and in eval mode, with its processor."""

    model: PreTrainedModel
    processor: Any
    mark: str
    """What stands for an image in a text that the processor reads."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.processor.tokenizer


def without_video(processor_class: type[Any]) -> type[Any]:
    """The class of a processor, without the part for videos, which needs torchvision."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return (
            type(None)
            if name == "video_processor"
            else super(cls, self).check_argument_for_proper_class(name, argument)
        )

    cls = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check})
    return cls


def tokenizer_with(words: Sequence[str], **named: str) -> PreTrainedTokenizerFast:
    """One character a token, and special words; `named` says which of them is what, for the processor."""
    tokenizer = make_tokenizer(words)
    tokenizer.add_special_tokens({"additional_special_tokens": [*words]})
    tokenizer._set_model_specific_special_tokens(special_tokens=named)
    return tokenizer


def text_config(tokenizer: PreTrainedTokenizerFast, **options: Any) -> dict[str, Any]:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {**TEXT, "vocab_size": len(tokenizer), **ids, **options}


def qwen(kind: str) -> Family:
    """Qwen2.5-VL; Qwen3-VL, whose first layers get image states too; Qwen3.5, with layers that are recurrent."""
    words = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = tokenizer_with(words)
    names = ["vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"]
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(words), strict=True))
    half = HIDDEN // HEADS // 2
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * (half // 4)] + [half // 4] * 2}
    text = text_config(tokenizer, rope_parameters=rope)
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        config: Any = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, tie_word_embeddings=True)
        model: Any = hf.Qwen2_5_VLForConditionalGeneration(config)
        processor_class: Any = hf.Qwen2_5_VLProcessor
    elif kind == "qwen3_vl":
        text |= {"head_dim": HIDDEN // HEADS}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config = hf.Qwen3VLConfig(text_config=text, vision_config=vision, **ids, tie_word_embeddings=True)
        model = hf.Qwen3VLForConditionalGeneration(config)
        processor_class = hf.Qwen3VLProcessor
    else:
        text |= {"head_dim": 16, "rope_parameters": None, "layer_types": ["linear_attention", "full_attention"]}
        text |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": []}
        config = hf.Qwen3_5Config(text_config=text, vision_config=vision, **ids, tie_word_embeddings=True)
        model = hf.Qwen3_5ForConditionalGeneration(config)
        processor_class = hf.Qwen3VLProcessor
    size = {"shortest_edge": 64, "longest_edge": 10**6}
    image_processor = hf.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    processor = without_video(processor_class)(image_processor=image_processor, tokenizer=tokenizer)
    return Family(model, processor, "<|vision_start|><|image_pad|><|vision_end|>")


def smolvlm(hidden: int = HIDDEN) -> Family:
    tokenizer = tokenizer_with(["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"])
    config = hf.SmolVLMConfig(
        text_config=text_config(tokenizer, model_type="llama", hidden_size=hidden),
        vision_config={**VISION, "image_size": SIDE, "patch_size": 4},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    longest = {"longest_edge": SIDE}
    image_processor = hf.SmolVLMImageProcessorPil(size=longest, max_image_size=longest, do_image_splitting=False)
    # It asks for the package num2words, with which it counts the frames of videos.
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    cls = without_video(hf.SmolVLMProcessor)
    processor = cls(image_processor, tokenizer, None, image_seq_len=16)
    return Family(hf.SmolVLMForConditionalGeneration(config), processor, "<image>")


def llava_onevision() -> Family:
    tokenizer = tokenizer_with(["<image>", "<video>"])
    grids = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    config = hf.LlavaOnevisionConfig(
        text_config=text_config(tokenizer, model_type="qwen2"),
        vision_config={
            **VISION,
            "model_type": "siglip_vision_model",
            "image_size": SIDE,
            "patch_size": 8,
            "vision_use_head": False,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=grids,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    size = {"height": SIDE, "width": SIDE}
    image_processor = hf.LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=grids)
    cls = without_video(hf.LlavaOnevisionProcessor)
    options = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    processor = cls(image_processor=image_processor, tokenizer=tokenizer, **options)
    return Family(hf.LlavaOnevisionForConditionalGeneration(config), processor, "<image>")


def internvl() -> Family:
    words = ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"]
    names = ["context_image_token", "start_image_token", "end_image_token", "video_token"]
    tokenizer = tokenizer_with(words, **dict(zip(names, words, strict=True)))
    config = hf.InternVLConfig(
        text_config=text_config(tokenizer, model_type="qwen2"),
        vision_config={**VISION, "image_size": [SIDE, SIDE], "patch_size": [4, 4]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=16,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )
    size = {"height": SIDE, "width": SIDE}
    image_processor = hf.GotOcr2ImageProcessorPil(size=size, crop_to_patches=False)
    cls = without_video(hf.InternVLProcessor)
    processor = cls(image_processor=image_processor, tokenizer=tokenizer, image_seq_length=16)
    return Family(hf.InternVLForConditionalGeneration(config), processor, "<IMG_CONTEXT>")


def gemma3() -> Family:
    """Its image tokens see later ones."""
    words = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    names = ["boi_token", "eoi_token", "image_token"]
    tokenizer = tokenizer_with(words, **dict(zip(names, words, strict=True)))
    boi, eoi, image = tokenizer.convert_tokens_to_ids(words)
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = hf.Gemma3Config(
        text_config=text_config(tokenizer, head_dim=16, query_pre_attn_scalar=16, **layers),
        vision_config={**VISION, "image_size": SIDE, "patch_size": 8, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_id=image,
        tie_word_embeddings=True,
    )
    image_processor = hf.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = hf.Gemma3Processor(image_processor=image_processor, tokenizer=tokenizer, image_seq_length=4)
    return Family(hf.Gemma3ForConditionalGeneration(config), processor, "<start_of_image>")


MAKERS: dict[str, Callable[[], Family]] = {
    "qwen2_5_vl": lambda: qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: qwen("qwen3_vl"),
    "qwen3_5": lambda: qwen("qwen3_5"),
    "smolvlm": smolvlm,
    "llava_onevision": llava_onevision,
    "internvl": internvl,
    "gemma3": gemma3,
}
CAUSAL = [name for name in MAKERS if name != "gemma3"]
"""The families whose image tokens see no later ones."""


def family_of(name: str, seed: int = 0, scale: float = 0.2) -> Family:
    """A family with random weights, by its name in `MAKERS`."""
    torch.manual_seed(seed)
    family = MAKERS[name]()
    randomised(family.model, seed, scale)
    return family


def folder_of(family: Family, folder: Any) -> str:
    """Saves model and processor where a run reads them."""
    family.model.save_pretrained(folder)
    family.processor.save_pretrained(folder)
    return str(folder)


def picture(seed: int, side: int = SIDE) -> Image.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompt_of(family: Family, id: int, text: str, images: Sequence[Image.Image] = ()) -> Prompt:
    """A prompt as a processor makes it; `text` has the family's mark for each image."""
    question = Question(text, "1", f"images:{id}", images=tuple(images))
    if not images:
        return Prompt(id, text, family.tokenizer(text)["input_ids"], question)
    inputs = dict(family.processor(text=[text], images=[[*images]], return_tensors="pt"))
    token_ids = inputs.pop("input_ids")[0].tolist()
    del inputs["attention_mask"]
    # Tests of the core, which load models that see for text, have no plugins.
    from grpo_lightning.plugins.data.images.pixels import Pixels

    return Prompt(id, text, token_ids, question, images=Pixels(inputs))


def mixed_prompts(family: Family) -> list[Prompt]:
    """Two prompts of equal text with an image each, one with two images, and one of text alone."""
    mark = family.mark
    return [
        prompt_of(family, 10, f"{mark}How?", [picture(0)]),
        prompt_of(family, 20, f"{mark}How?", [picture(1)]),
        prompt_of(family, 30, f"{mark}and{mark}?", [picture(2), picture(3)]),
        prompt_of(family, 40, "1+1="),
    ]


def whole_model_logp(model: PreTrainedModel, prompt: Prompt, completion: Sequence[int]) -> Tensor:
    """[R] log-probs of a completion, by one forward of the whole model, as transformers makes it."""
    inputs = dict(getattr(prompt.images, "inputs", {}))
    for name in inputs.keys() & {"mm_token_type_ids", "token_type_ids"}:
        zeros = torch.zeros(1, len(completion), dtype=inputs[name].dtype)
        inputs[name] = torch.cat([inputs[name], zeros], 1)
    for name, value in inputs.items():
        inputs[name] = value.to(model.dtype) if value.is_floating_point() else value
    input_ids = torch.tensor([[*prompt.token_ids, *completion]])
    logits = model(input_ids=input_ids, use_cache=False, **inputs).logits[0, len(prompt.token_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, input_ids[0, len(prompt.token_ids) :, None]).squeeze(-1)


def seeing_policy(name: str, seed: int = 0, **options: Any) -> tuple[Policy, Family]:
    """A policy around a family, and the family."""
    family = family_of(name, seed)
    return Policy.from_model(family.model, family.tokenizer, **options), family
