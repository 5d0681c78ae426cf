"""Digests of questions, which tell whether two validations asked the same."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_lightning.types import Question


def digest_of_question(question: Question) -> str:
    """Returns a digest of a question's text, earlier turns, gold answer and images."""
    images = [digest_of_image(image) for image in question.images]
    content = [question.text, question.answer, question.history, images]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def digest_of_image(image: Any) -> str:
    """Returns a digest of an image's bytes or pixels; the name of a file, whose folder may be another elsewhere."""
    if isinstance(image, (str, Path)):
        return Path(image).name
    return hashlib.sha256(image if isinstance(image, bytes) else image.tobytes()).hexdigest()


def digest_of_set(digests: Iterable[str]) -> str:
    """Returns 16 hexadecimal digits for the digests of questions, in their order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
