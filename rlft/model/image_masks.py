"""Images that are read both ways: a token sees the rest of its image, too, in some kinds of layers.

Which kinds those are is read from the masks that the folder's own class makes, so that no model is known by name. As
for transformers, image tokens without another token between them are of one image here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlft.model.kernels.split_attention import Span
from rlft.types import ImageRows, UserError

TYPES = ("token_type_ids", "mm_token_type_ids")
"""What transformers calls the argument that says which tokens are an image's, by 1 among zeros."""

PROBE = (0, 1, 1, 1, 1, 0, 1, 1, 0)
WINDOW = 3  # a row with two images, and a sliding window that is shorter than the first of them


class ImageMasks:
    """The masks of a class of models that reads images both ways.

    kinds: the kinds of layers (`layer_types` of a config) in which a token sees the rest of its image.
    """

    def __init__(self, own: type[PreTrainedModel], kinds: frozenset[str]) -> None:
        self._own, self.kinds = own, kinds

    @classmethod
    def of(cls, own: type[PreTrainedModel], config: PreTrainedConfig) -> Self | None:
        """Those of a model with this config; None if each of its tokens sees only those before it.

        UserError if they see others than those before them and the rest of their image.
        """
        if _argument(own) is None:
            return None
        text = deepcopy(config.get_text_config(decoder=True))
        text.sliding_window, text._attn_implementation = WINDOW, "eager"
        is_image, present = torch.tensor([PROBE]) == 1, torch.ones(1, len(PROBE), dtype=torch.int64)
        masks = _made(own, text, torch.zeros(1, len(PROBE), 1), is_image, present)
        kinds = set()
        for kind in dict.fromkeys(_kinds(text)):
            seen = masks[kind][0, 0] == 0
            before, both_ways = _expected(WINDOW if kind == "sliding_attention" else len(PROBE))
            if torch.equal(seen, both_ways):
                kinds.add(kind)
            elif not torch.equal(seen, before):
                problem = f"the tokens of a {config.model_type} see others than those before them and their image's"
                raise UserError("model.path", problem, got=config.name_or_path, remedy="use data without images")
        return cls(own, frozenset(kinds)) if kinds else None

    def of_rows(self, model: Any, embedded: Tensor, is_image: Tensor, mask: Tensor) -> Mapping[str, Any]:
        """{kind of layers: its mask} for padded rows: `[B, T, hidden]`, bool `[B, T]`, int64 `[B, T]`."""
        return _made(self._own, model.config.get_text_config(), embedded, is_image, mask)


def _argument(own: type[PreTrainedModel]) -> str | None:
    """The argument of the class's masks that says which tokens are an image's; None if it has none."""
    make: Any = getattr(own, "create_masks_for_generate", None)
    return None if make is None else next((name for name in TYPES if name in inspect.signature(make).parameters), None)


def _made(own: Any, text: PreTrainedConfig, embedded: Tensor, is_image: Tensor, mask: Tensor) -> Mapping[str, Any]:
    inputs = {"inputs_embeds": embedded, "attention_mask": mask, str(_argument(own)): is_image.long()}
    # The cache has one name before transformers 5.24, and another one since.
    unset = dict.fromkeys(("position_ids", "past_key_values", "cache"))
    made = own.create_masks_for_generate(config=text, **inputs, **unset)
    return made if isinstance(made, Mapping) else dict.fromkeys(_kinds(text), made)


def _kinds(text: PreTrainedConfig) -> Sequence[str]:
    return getattr(text, "layer_types", None) or ["full_attention"]


def _expected(window: int) -> tuple[Tensor, Tensor]:
    """(which keys `[N, N]` the tokens of PROBE see if they see those before them, or also the rest of their image)."""
    places, image = torch.arange(len(PROBE)), torch.zeros(len(PROBE), dtype=torch.int64)
    for number, (start, length) in enumerate(_runs(PROBE, (0, len(PROBE))), 1):
        image[start : start + length] = number
    before = (places <= places[:, None]) & (places > places[:, None] - window)
    ahead = (places > places[:, None]) & (image == image[:, None]) & (image > 0)
    return before, before | ahead


def both_ways(images: ImageRows, prompts: Sequence[Span], window: int | None) -> tuple[Span, ...]:
    """The images in these prompts of a packed row whose tokens see each other both ways in layers with this window.

    `images` are in main memory, and their rows are `[1, N]`.
    """
    kind = "full_attention" if window is None else "sliding_attention"
    if images.masks is None or kind not in images.masks.kinds:
        return ()
    is_image = (images.rows[0] != ImageRows.TEXT).tolist()
    return tuple(run for prompt in prompts for run in _runs(is_image, prompt) if run[1] > 1)


def _runs(is_image: Sequence[int], within: Span) -> list[Span]:
    """The runs of tokens of images inside this span."""
    start, length = within
    runs = [list(run) for is_one, run in groupby(range(start, start + length), is_image.__getitem__) if is_one]
    return [(run[0], len(run)) for run in runs]
