"""Prompts with drawn images, and batches of completions of them."""

import io

import numpy as np
import torch
from PIL import Image as pillow
from reward_groups import group_of

from rlft.data.prompts import tokenised
from rlft.model.backbone import Backbone
from rlft.types import IMAGE, Batch, Group, Image, Prompt, Scores


def drawn(seed: int, height: int, width: int) -> Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, "PNG")
    return Image(digest=f"{seed}", data=file.getvalue())


def prompts(backbone: Backbone) -> list[Prompt]:
    """One image, two images of other shapes, the first one again with another question, and none."""
    first, second, third = drawn(1, 16, 24), drawn(2, 24, 16), drawn(3, 32, 16)
    asked = [
        (f"{IMAGE}How many?", (first,)), (f"Is {IMAGE} like {IMAGE}?", (second, third)),
        (f"{IMAGE}What colour is it?", (first,)), ("How are you?", ()),
    ]  # fmt: skip
    made = [
        Prompt(id=str(number), messages=({"role": "user", "content": text},), answer="", images=images)
        for number, (text, images) in enumerate(asked)
    ]
    return list(tokenised(made, backbone.tokenizer, "chat"))


def group(prompt: Prompt, lengths: tuple[int, ...]) -> Group:
    return group_of(prompt, [[20 + (7 * row + 3 * t) % 60 for t in range(n)] for row, n in enumerate(lengths)])


def of_two(backbone: Backbone) -> tuple[list[Group], Batch]:
    """Two completions of each prompt."""
    groups = [group(prompt, (5, 9)) for prompt in prompts(backbone)]
    return groups, backbone.collated(groups, Scores(total=torch.zeros(4, 2), by_reward={}))
