"""Pictures of questions, whatever they come as: paths, bytes of a file, or images of PIL."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import UsageError

THUMBNAIL = 256
"""Pixels of the longer side of a picture in a record."""


def size_of(image: Any, source: str) -> tuple[int, int]:
    """Returns width and height of an image of the row `source`; of a file it reads the beginning."""
    with _opened(image, source) as picture:
        return picture.size


def in_rgb(image: Any, source: str) -> Image.Image:
    """Returns an image of the row `source` upright and in RGB; what is transparent becomes white."""
    with _opened(image, source) as picture:
        upright = ImageOps.exif_transpose(picture)
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        return upright.convert("RGB")


def thumbnail(image: Any, source: str) -> str:
    """Returns a small copy of an image as the address of a page's picture: PNG or JPEG, the shorter of the two."""
    picture = in_rgb(image, source)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    files = {}
    for kind in ("png", "jpeg"):
        file = io.BytesIO()
        picture.save(file, kind)
        files[kind] = file.getvalue()
    kind = min(files, key=lambda name: len(files[name]))
    return f"data:image/{kind};base64,{base64.b64encode(files[kind]).decode()}"


@contextmanager
def _opened(image: Any, source: str) -> Iterator[Image.Image]:
    """Opens an image as PIL has it; a file is closed in the end. Raises UsageError for what is no image."""
    try:
        if isinstance(image, Image.Image):
            yield image
        else:
            file = io.BytesIO(image) if isinstance(image, bytes) else Path(image).expanduser()
            with Image.open(file) as picture:
                yield picture
    except Exception as error:  # Files of images raise exceptions of any class.
        name = f"{len(image)} bytes" if isinstance(image, bytes) else f"{image!s:.200}"
        raise UsageError(f"{source}: {name} cannot be read as an image ({first_line(error)}); fix the row") from error
