"""The images of the prompts that a report shows: read again from the run's data, and made small."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

from rlft.config.instantiate import instantiate
from rlft.system.terminal import say
from rlft.tokens.images import picture
from rlft.types import Image, Split

MAX_EDGE = 256
"""The most pixels along an edge of a shown image."""

MAX_BYTES = 4_000_000
"""The most bytes of a page's images, as data URLs."""


def digests_in(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The digests of the groups' images, each once, in the order in which the page shows them."""
    return list(dict.fromkeys(digest for group in groups for digest in group.get("images", ())))


def shown_images(config: Mapping[str, Any], digests: Sequence[str], max_bytes: int) -> dict[str, str]:
    """{digest: a data URL with the image, made small} of those that the run's data have and that fit.

    A line on stderr says why the data cannot be read, as where they have moved.

    Args:
        config: the run's plain config.
        digests: of the prompts' images, the most important first.
        max_bytes: the most bytes of all URLs together.
    """
    shown: dict[str, str] = {}
    if not digests:
        return shown
    try:
        for image in _images_of(config, digests):
            if len(url := data_url(image)) <= max_bytes:
                max_bytes -= len(url)
                shown[image.digest] = url
    except Exception as error:  # a data source and its files are the user's own, and may raise anything
        say(f"the report lacks images, since the run's data cannot be read: {error}")
    return shown


def _images_of(config: Mapping[str, Any], digests: Sequence[str]) -> Iterator[Image]:
    """The images with these digests, in this order, as far as the data have them."""
    data, images = instantiate(config["data"], "data"), dict.fromkeys(digests)
    for split in Split:
        for image in (image for prompt in data.load(split) for image in prompt.images):
            if image.digest in images:
                images[image.digest] = image
        if None not in images.values():
            break
    return (image for image in images.values() if image is not None)


def data_url(image: Image) -> str:
    """The image as a JPEG in a data URL, at most MAX_EDGE pixels wide and high."""
    small, file = picture(image), BytesIO()
    small.thumbnail((MAX_EDGE, MAX_EDGE))
    small.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
