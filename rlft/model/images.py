"""Images as a language model reads them: vectors in the place of their tokens, and positions in height and width.

The tower that turns an image into vectors is frozen, so that these are constants: each image is computed once, by
itself, and its vectors are kept. It is the folder's own class without decoder layers, which is loaded when the first
image comes, so that nothing changes for texts. The model that is trained gets the vectors in place of embeddings
(`ImageRows.inputs`), in the trainer's passes and in the prefill of the transformers engine alike.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlft.model.kernels.split_attention import Span
from rlft.model.network_files import Network, load_network
from rlft.model.text_model import own_class
from rlft.tokens.images import ImageProcessor
from rlft.types import Image, ImageRows, Prompt, UserError, counted, require

KEPT_BYTES = 256 * 2**20  # how much memory the vectors of images take that are kept for later steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An image as its model reads it."""

    vectors: Tensor  # `[K, hidden]`, in main memory
    deep: Tensor | None  # `[L, K, hidden]`, or None, as in `ImageRows`
    grid: Tensor | None  # int64 `[1, 3]`, its patches in time, height and width, if the processor says them

    @property
    def num_bytes(self) -> int:
        return self.vectors.nbytes + (0 if self.deep is None else self.deep.nbytes)


@dataclass(eq=False)
class ImageEncoder:
    """Turns the images of prompts into `ImageRows` for one model."""

    config: Any  # of the folder's own class
    source: Mapping[str, Any]  # transformers' keyword arguments that say where its folder is
    dtype: torch.dtype  # of the tower
    device: torch.device
    processor: Callable[[], ImageProcessor]  # gives that of the folder
    _tower: Any = field(default=None, init=False)
    _masks: ImageMasks | None = field(default=None, init=False)
    _kept: OrderedDict[str, Encoded] = field(default_factory=OrderedDict, init=False)

    def rows_of(self, prompts: Sequence[Prompt], width: int) -> ImageRows | None:
        """Rows `[P, width]` that begin with these prompts, one each; None if none of them has images."""
        if not any(prompt.images for prompt in prompts):
            return None
        encoded = {image.digest: self._encode(image) for prompt in prompts for image in prompt.images}
        starts, count = {}, 0
        for digest, each in encoded.items():
            starts[digest], count = count, count + len(each.vectors)
        rows = torch.full((len(prompts), width), ImageRows.TEXT)
        positions = [self._positions(prompt, encoded, width) for prompt in prompts]
        for p, prompt in enumerate(prompts):
            own = [torch.arange(starts[i.digest], starts[i.digest] + len(encoded[i.digest].vectors))
                   for i in prompt.images]  # fmt: skip
            places = self._is_image(prompt).nonzero()[:, 0] if own else ()
            number = sum(map(len, own))
            made = f"{counted(number, 'vector')} of images that have {counted(len(places), 'token')}"
            problem = f"its tower makes {made} in {prompt.id!r}"
            remedy = "use the processor_config.json and preprocessor_config.json that belong to the model"
            require(number == len(places), "model.path", problem, remedy=remedy)
            if own:
                rows[p, places] = torch.cat(own)
        deep = [each.deep for each in encoded.values() if each.deep is not None]
        return ImageRows(
            vectors=torch.cat([each.vectors for each in encoded.values()]),
            deep=torch.cat(deep, 1) if deep else None,
            rows=rows,
            positions=torch.stack([x for x in positions if x is not None]) if positions[0] is not None else None,
            masks=self._masks,
        )

    def _is_image(self, prompt: Prompt) -> Tensor:
        return torch.tensor(prompt.token_ids) == self.processor().image_token_id

    def _positions(self, prompt: Prompt, encoded: Mapping[str, Encoded], width: int) -> Tensor | None:
        """int64 `[width, 3]` of a prompt and what follows it; None if the model has ordinary positions."""
        if not hasattr(self._tower, "get_rope_index"):
            return None
        length = len(prompt.token_ids)
        of_prompt = torch.arange(length)[:, None].expand(-1, 3)
        if prompt.images:
            grids = [encoded[image.digest].grid for image in prompt.images]
            found, _ = self._tower.get_rope_index(
                input_ids=torch.tensor([prompt.token_ids]),
                mm_token_type_ids=self._is_image(prompt)[None].int(),
                image_grid_thw=torch.cat([grid for grid in grids if grid is not None]),
            )
            of_prompt = found[:, 0].T
        behind = of_prompt.max() + 1 + torch.arange(width - length)
        return torch.cat([of_prompt, behind[:, None].expand(-1, 3)])

    @torch.no_grad()
    def _encode(self, image: Image) -> Encoded:
        """The vectors of an image, which do not depend on others that are computed with it."""
        if image.digest in self._kept:
            self._kept.move_to_end(image.digest)
            return self._kept[image.digest]
        if self._tower is None:
            self._tower = self._load()
        made = read_image(self._tower, self.processor().tensors(image), self.device)
        self._kept[image.digest] = made
        while len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return made

    def _load(self) -> Any:
        """The folder's own class with its tower alone."""
        model: Any = load_network(network_of_tower(self.config, self.source), dtype=self.dtype)
        model.requires_grad_(False).eval().to(self.device)
        self._masks = ImageMasks.of(_own_class(self.config), self.config)
        return model.base_model


def read_image(tower: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Encoded:
    """The image of which a processor makes these tensors, by the tower on this device."""
    accepted = inspect.signature(tower.get_image_features).parameters
    inputs = {name: value.to(device) for name, value in tensors.items() if name in accepted}
    features = tower.get_image_features(**inputs, return_dict=True)
    parts = features.pooler_output
    vectors = torch.cat(tuple(parts)) if not isinstance(parts, Tensor) else parts.flatten(0, -2)
    deep = getattr(features, "deepstack_features", None)
    if deep is not None:
        deep = torch.stack([torch.cat(tuple(layer)) for layer in deep]).cpu()
    return Encoded(vectors=vectors.cpu(), deep=deep, grid=tensors.get("image_grid_thw"))


def network_of_tower(config: Any, source: Mapping[str, Any]) -> Network:
    """The tower in a folder whose model has this config; `source` is transformers' keyword arguments for loading it."""
    return Network(loader=tower_class(config), config=tower_config(config), source=source, key="model.path")


def tower_class(config: Any) -> Any:
    """The folder's own class without its text model and its output head."""

    class Tower(_own_class(config)):
        _keys_to_ignore_on_load_unexpected = ("",)  # those of the text model

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            text_parts = (self.get_decoder(), self.get_output_embeddings())
            for name in [name for name, module in self.named_modules() if any(module is part for part in text_parts)]:
                self.set_submodule(name, torch.nn.Identity())

    Tower.__name__ = Tower.__base__.__name__
    return Tower


def _own_class(config: Any) -> Any:
    contains = own_class(config)
    assert contains is not None, "the plan refuses images for a model without a tower"
    return contains


def tower_config(config: Any) -> Any:
    """The config of a folder for its `tower_class`, in which no text model has to be made first."""
    config = deepcopy(config)
    text = config.get_text_config(decoder=True)
    config.tie_word_embeddings = text.tie_word_embeddings = False
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    if getattr(text, "hidden_size_per_layer_input", None):
        text.hidden_size_per_layer_input = 0
    return config


# -- images that are read both ways ------------------------------------------------------------------------------------
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
