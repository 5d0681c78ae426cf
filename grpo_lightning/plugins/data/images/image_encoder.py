"""The processor of a model that sees: it makes tokens and pixels of a text with images."""

import re
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from grpo_lightning.policy import pretrained
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import UsageError, require

PACKAGES = {
    "torchvision": "pip install torchvision, from the index that torch came from: the builds must fit",
    "num2words": "pip install num2words",
    "sentencepiece": "pip install sentencepiece",
    "timm": "pip install timm",
}
"""Packages that processors of some families need, and how to get them."""
PROBE = "What is the question?"


class ImageEncoder:
    """Makes tokens and pixels of a text with images, by the processor in the policy's folder.

    Args:
        policy: The policy; its weights need not be loaded.
    """

    def __init__(self, policy: Policy) -> None:
        self.key = f"{policy.key}.path={policy.path}"
        self.processor = _processor_of(policy, self.key)
        self.tokenizer = policy.tokenizer
        # Older processors have the chat template, and the tokenizer in the same folder has none.
        self.tokenizer.chat_template = self.tokenizer.chat_template or getattr(self.processor, "chat_template", None)
        self.token = str(getattr(self.processor, "boi_token", None) or self.processor.image_token)
        """The token that stands for an image, once, in the text of a prompt."""
        self.mark = self._mark()
        """The text of an image in a prompt without a chat template."""
        self._added_by_sizes: dict[tuple[tuple[int, int], ...], int] = {}

    def _mark(self) -> str:
        """Returns the text that the chat template writes for an image before a text; without one, the image token."""
        text = [{"type": "text", "text": PROBE}]
        try:
            with_image, without_image = (
                self.processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
                for content in ([{"type": "image"}, *text], text)
            )
        except Exception:  # A template is a program, and raises exceptions of any class.
            return self.token
        text_before, _, text_after = without_image.partition(PROBE)
        mark = with_image.removeprefix(text_before).removesuffix(PROBE + text_after)
        is_inserted = with_image == text_before + mark + PROBE + text_after
        return mark if is_inserted and self.token in mark else self.token

    def encode(
        self, text: str, images: Sequence[Image.Image], source: str, first_ids: Sequence[int] = ()
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Returns the token ids of a text with images, and the further arguments of the model.

        Args:
            text: The text, with an image token for each image.
            images: The images in their order.
            source: The row, for messages.
            first_ids: Special tokens before the text.
        """
        num_tokens = text.count(self.token)
        if num_tokens != len(images):
            raise UsageError(
                f"{source}: the prompt has the image token {self.token} {num_tokens} times for {len(images)} images. "
                "Either the chat template of the model writes no images, and data.chat=false helps, or the row or "
                "data.template has the token: write <image> there"
            )
        try:
            batch = self.processor(text=[text], images=[[*images]], return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # Processors raise exceptions of any class.
            raise UsageError(f"{source}: the processor of the model refuses it ({first_line(error)})") from error
        pixels: dict[str, Tensor] = dict(batch)
        token_ids = pixels.pop("input_ids")[0].tolist()
        pixels.pop("attention_mask", None)
        for name, values in pixels.items():
            if name.endswith("token_type_ids"):
                pixels[name] = F.pad(values, (len(first_ids), 0))
        return [*first_ids, *token_ids], pixels

    def num_added(self, sizes: Sequence[tuple[int, int]], source: str) -> int:
        """Returns the tokens of images of some sizes beyond one for each image."""
        key = tuple(sizes)
        if key not in self._added_by_sizes:
            blanks = [Image.new("RGB", size) for size in sizes]
            token_ids, _ = self.encode(self.token * len(sizes), blanks, source)
            self._added_by_sizes[key] = len(token_ids) - len(sizes)
        return self._added_by_sizes[key]


def _processor_of(policy: Policy, key: str) -> Any:
    """Returns the processor in the policy's folder; raises UsageError if it reads no images or lacks a package."""
    from transformers import AutoProcessor  # runs without images need not wait for it

    path = pretrained.source(policy.path, f"{policy.key}.path")
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=policy.trust_remote_code)
    except Exception as error:  # Remote code and families raise exceptions of any class.
        for package, advice in PACKAGES.items():
            if re.search(package, str(error), re.IGNORECASE):
                raise UsageError(f"{key}: its processor of images needs the package {package}: {advice}") from error
        raise UsageError(
            f"{key}: the questions have images, and there is no processor of images ({first_line(error)}). Use a model "
            "that sees, with its processor beside it, or leave out data.task.images"
        ) from error
    has_images = getattr(processor, "image_processor", None) is not None and hasattr(processor, "image_token")
    require(
        has_images,
        f"{key}: the questions have images, and the processor there takes none. Use a model that sees, with its "
        "processor beside it, or leave out data.task.images",
    )
    return processor
