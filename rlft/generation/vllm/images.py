"""Prompts with images as vLLM takes them: one token for each image, and the image.

vLLM puts the tokens of an image's vectors in the place of that token, computes the vectors by its own tower, once while
they are in its cache, and decodes with the model's positions. The numbers of an image come from the processor that the
trainer reads it with, which resizes by Pillow, so that both sides see the same pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlft.tokens.images import ImageProcessor, picture
from rlft.types import Prompt, UserError, counted

CACHE_GB = 0.25  # main memory for the numbers of images that come again, in GiB

MODALITIES = ("image", "video", "audio")


def image_options(images: int, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for prompts with at most this many images each; 0: towers are not loaded."""
    if not images:
        return {"language_model_only": True}
    limits = {**dict.fromkeys(MODALITIES, 0), "image": images}
    # On a CPU the size of the KV cache is given, and no memory is measured.
    return {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": CACHE_GB, "skip_mm_profiling": on_cpu}


def read_as_the_trainer(llm: Any, processor: ImageProcessor) -> None:
    """Makes the engine read images with the trainer's processor."""
    llm.llm_engine.renderer.get_mm_processor().info.get_hf_processor().image_processor = processor.of_images


def request(prompt: Prompt) -> dict[str, Any]:
    """vLLM's request for a prompt, with or without images."""
    if not prompt.images:
        return {"prompt_token_ids": list(prompt.token_ids)}
    return {
        "prompt_token_ids": list(prompt.template_ids),
        "multi_modal_data": {"image": [picture(image) for image in prompt.images]},
        "multi_modal_uuids": {"image": [image.digest for image in prompt.images]},
    }


def check_tokens(prompt: Prompt, read: Sequence[int], model_path: str) -> None:
    """Refuses a prompt that the engine has read as other tokens than the trainer. UserError("model.path")."""
    if list(read) == list(prompt.token_ids):
        return
    numbers = f"{counted(len(read), 'token')}, and {len(prompt.token_ids)} by the model's processor"
    problem = f"vLLM reads the prompt {prompt.id!r} with its images as {numbers}"
    raise UserError("model.path", problem, got=model_path, remedy="use generation=transformers")
