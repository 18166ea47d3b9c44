"""Between images and tokens: the processor of a model's folder, which is read when the first image comes.

A chat template writes one token for each image. In the prompt the processor's own text stands in its place, which has
one token for each vector that the model reads there (`rlft.model.images`). Images are resized by Pillow, whatever else
is installed, so that a prompt has the same tokens and numbers everywhere.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.tokens.text import RunTokenizer
from rlft.types import IMAGE, Image, Prompt, UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

EXACT = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3", "smolvlm", "gemma3", "gemma4")
"""Types of models whose images rlft reads as transformers does; tests compare the log-probs."""


def processor_of(tokenizer: RunTokenizer) -> ImageProcessor:
    """The processor of the tokenizer's model. UserError if there is none."""
    assert tokenizer.processor is not None, "a model's tokenizer knows where its processor is"
    return tokenizer.processor()


def read_processor(tokenizer: PreTrainedTokenizerBase, source: Mapping[str, Any], config: Any) -> ImageProcessor:
    """The processor of the model with this config; `source` is for transformers' from_pretrained."""
    path, kind = source["pretrained_model_name_or_path"], config.model_type
    if getattr(config, "vision_config", None) is None:
        problem = f"the data have images, and a {kind} reads none"
        raise UserError("model.path", problem, got=path, remedy="use a model with a vision tower, such as Qwen3.5")
    if kind not in EXACT:
        problem = f"the data have images, and those of a {kind} are not read exactly"
        raise UserError("model.path", problem, got=path, remedy=f"use a model of the type {', '.join(EXACT)}")
    try:
        # In `transformers` itself, release 5.17 has it only with torchvision.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        of_images = _without_videos(_class_of(config))
        images = AutoImageProcessor.from_pretrained(**source, backend="pil")
        where = {name: value for name, value in source.items() if name != "pretrained_model_name_or_path"}
        fields, _ = of_images.get_processor_dict(path, **where)
        parts = [{"image_processor": images, "tokenizer": tokenizer}.get(name) for name in of_images.get_attributes()]
        made = of_images.from_args_and_dict(parts, fields)
    except ImportError as error:
        problem = f"its processor of images needs a library ({str(error).strip().splitlines()[0]})"
        raise UserError("model.path", problem, got=path, remedy="install rlft with its extra vision") from None
    except (OSError, ValueError, TypeError) as error:
        problem = f"its processor of images cannot be read ({str(error).strip().splitlines()[0][:200]})"
        remedy = "the folder needs preprocessor_config.json next to config.json"
        raise UserError("model.path", problem, got=path, remedy=remedy) from None
    return ImageProcessor(made, config)


def _class_of(config: Any) -> Any:
    """The class of processors of a model with this config.

    Before transformers 5.21, Gemma 4's takes functions from the module that resizes by torchvision. Where that is not
    installed, the module that resizes by Pillow stands in its place, which has the same functions.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind = config.model_type
    module = f"transformers.models.{kind}.image_processing"
    try:
        return PROCESSOR_MAPPING[type(config)]
    except ModuleNotFoundError:
        if find_spec("torchvision") is not None or find_spec(f"{module}_pil_{kind}") is None:
            raise
    sys.modules[f"{module}_{kind}"] = import_module(f"{module}_pil_{kind}")
    try:
        return PROCESSOR_MAPPING[type(config)]
    finally:
        del sys.modules[f"{module}_{kind}"]


def _without_videos(processor: Any) -> Any:
    """The class, which does without a part for videos, whose libraries are many."""

    class OfImages(processor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    OfImages.__name__ = processor.__name__
    return OfImages


class ImageProcessor:
    """A processor of transformers, for images of a model with this config."""

    def __init__(self, processor: Any, config: Any) -> None:
        self._processor = processor
        # What its own call gives, such as for the numbers of rows and columns of an image's parts.
        self._defaults = processor.valid_processor_kwargs._defaults.get("images_kwargs", {})
        token = getattr(config, "image_token_id", None)
        self.image_token_id: int = config.image_token_index if token is None else token
        self.of_images: Any = processor.image_processor  # transformers'
        self._token: str = processor.image_token  # what the template writes, which may be another one than the vectors'

    def expanded(self, text: str, prompt: Prompt) -> str:
        """The text of a prompt with what stands there for its images."""
        if not prompt.images:
            return text
        parts = text.split(self._token)
        if len(parts) != len(prompt.images) + 1:
            number = len(parts) - 1
            problem = f"the model's chat template writes {number} of the {len(prompt.images)} images of {prompt.id!r}"
            raise UserError("model.path", problem, remedy="use a model whose template shows images")
        read = (self._processed(image, f" of {prompt.id!r}") for image in prompt.images)
        replacements = [self._processor.replace_image_token(each, 0) for each in read]
        return "".join(part for pair in zip(parts, [*replacements, ""], strict=True) for part in pair)

    def tensors(self, image: Image) -> dict[str, Tensor]:
        """What the model's tower reads of an image."""
        return dict(self._processed(image))

    def _processed(self, image: Image, whose: str = "") -> Any:
        try:
            return self.of_images([picture(image)], return_tensors="pt", **self._defaults)
        except (OSError, SyntaxError, ValueError) as error:
            what, remedy = f"the image{whose} cannot be read", "correct that row, or leave it out"
            problem = f"{what} ({type(error).__name__}: {error})"
            raise UserError("data.image_field", problem, got=image.path or image.digest, remedy=remedy) from None


def picture(image: Image) -> Picture:
    """The decoded image, in three colours, upright where a camera noted how it was held (EXIF's orientation).

    OSError, SyntaxError or ValueError if it cannot be read or decoded.
    """
    from PIL import Image as pillow, ImageOps

    try:
        with pillow.open(BytesIO(image.data) if image.data else image.path) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except pillow.DecompressionBombError as error:
        raise ValueError(str(error)) from None


def with_content(image: Image) -> Image:
    """The same image for a process on another machine, which may not have its file; as it is if that cannot be read."""
    with contextlib.suppress(OSError):
        return replace(image, data=image.data or Path(image.path).read_bytes())
    return image


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with lists of parts in place of texts, as templates read those with images.

    >>> in_parts([{"role": "user", "content": "\\ufffcHow many?"}])[0]["content"]
    [{'type': 'image'}, {'type': 'text', 'text': 'How many?'}]
    """
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(content: str) -> list[dict[str, str]]:
    pieces = re.split(f"({IMAGE})", content)
    return [{"type": "image"} if piece == IMAGE else {"type": "text", "text": piece} for piece in pieces if piece]
