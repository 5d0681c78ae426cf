"""Prompts of questions with images."""

from collections.abc import Sequence
from typing import Any

from grpo_lightning.plugins.data.images.image_encoder import ImageEncoder
from grpo_lightning.plugins.data.images.pictures import in_rgb, size_of
from grpo_lightning.plugins.data.images.pixels import Pixels
from grpo_lightning.policy.chat import prompt_ids
from grpo_lightning.policy.policy import Policy
from grpo_lightning.tasks.tables import IMAGE
from grpo_lightning.types import Message, Question, UsageError


class ImagePrompts:
    """Writes the images of questions into prompts.

    Args:
        policy: The policy, with a processor of images in its folder.
        chat: Whether prompts are written in the chat template.
    """

    def __init__(self, policy: Policy, chat: bool) -> None:
        self.encoder = ImageEncoder(policy)
        self.chat = chat

    def turns(self, question: Question, turns: Sequence[Message]) -> list[Message]:
        """Returns the turns with the question's images where they say `<image>`, or before the question.

        In a chat the content of a turn with images is a list of parts, which the chat template writes.
        """
        num_images = len(question.images)
        contents = [turn["content"] for turn in turns]
        num_marks = sum(content.count(IMAGE) for content in contents)
        if num_marks == 0:
            contents[-1] = IMAGE * num_images + contents[-1]
        elif num_marks != num_images:
            raise UsageError(
                f"{question.source}: it says {IMAGE} {num_marks} times, and has {num_images} images; fix the row"
            )
        written = [
            self._parts(content) if self.chat and IMAGE in content else content.replace(IMAGE, self.encoder.mark)
            for content in contents
        ]
        return [turn | {"content": content} for turn, content in zip(turns, written, strict=True)]

    @staticmethod
    def _parts(content: str) -> list[dict[str, str]]:
        """Returns a content as parts: texts, with an image between two of them."""
        parts: list[dict[str, str]] = []
        for text in content.split(IMAGE):
            parts += [{"type": "text", "text": text}] if text else []
            parts.append({"type": "image"})
        return parts[:-1]

    def inputs(self, question: Question, text: str) -> tuple[list[int], Pixels]:
        """Returns the token ids of a rendered question, and its images as the processor has prepared them."""
        images = [in_rgb(image, question.source) for image in question.images]
        token_ids, pixels = self.encoder.encode(text, images, question.source, self._first_ids(text))
        return token_ids, Pixels(pixels)

    def num_tokens(self, question: Question, text: str) -> int:
        """Returns the number of tokens of a rendered question; of image files it reads the beginning."""
        sizes = [size_of(image, question.source) for image in question.images]
        num_text_tokens = len(self.encoder.tokenizer.encode(text, add_special_tokens=False))
        return len(self._first_ids(text)) + num_text_tokens + self.encoder.num_added(sizes, question.source)

    def _first_ids(self, text: str) -> list[int]:
        """Returns the special tokens before a text; a chat template writes them itself."""
        if self.chat:
            return []
        tokenizer: Any = self.encoder.tokenizer
        token_ids = prompt_ids(tokenizer, text)
        return token_ids[: len(token_ids) - len(tokenizer.encode(text, add_special_tokens=False))]
