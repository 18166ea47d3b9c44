"""What the images of prompts take on the trainer's device, beside their tokens: the vision tower, its pass, vectors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from rlft.data.prompts import PromptSet
from rlft.generation.memory import MemoryPart, When
from rlft.model.images import KEPT_BYTES, read_image, tower_class, tower_config
from rlft.plan.live_bytes import LiveBytes
from rlft.tokens.images import processor_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerDemand:
    """Memory demand of a vision tower and of images.

    Attributes:
        weights: bytes of the tower's weights.
        reading: the most bytes that are alive beside them while an image goes through it.
        vectors: bytes of the vectors of a prompt's images.
        num_prompts: number of prompts whose images are read in a run.
    """

    weights: int
    reading: int
    vectors: int
    num_prompts: int

    def parts(
        self, device: str, *, prompts_per_step: int, trained_at_once: int, sampled_at_once: int, towers: int = 1
    ) -> list[MemoryPart]:
        """The parts of the trainer's device.

        Vectors stay in main memory, those of a step once more. To a GPU go those of a micro-batch, twice: with its rows
        and with its packed row, and those of prompts that are decoded together.

        Args:
            trained_at_once: number of prompts in a micro-batch.
            sampled_at_once: number of prompts that are decoded together on this device, whose vectors the engine gets.
            towers: how many processes on this device have one: the trainer's, and engines with bases of their own.
        """
        copies = 2 if device != "cpu" else 1
        needs = [
            MemoryPart(name="vision tower", bytes=towers * self.weights, when=When.always, key="model.dtype"),
            MemoryPart(name="an image in the tower", bytes=towers * self.reading, when=When.reading),
            MemoryPart(
                name="vectors of images",
                bytes=copies * trained_at_once * self.vectors,
                when=When.updating,
                key="token_budget",
            ),
            MemoryPart(
                name="vectors of images that are sampled from",
                bytes=(device != "cpu") * sampled_at_once * self.vectors,
                when=When.sampling,
                key="prompts_per_step",
            ),
        ]
        if device == "cpu":
            kept = towers * min(KEPT_BYTES, self.num_prompts * self.vectors) + prompts_per_step * self.vectors
            needs.append(MemoryPart(name="vectors that are kept", bytes=kept, when=When.always, key="prompts_per_step"))
        return needs


def tower_demand(
    config: Any,
    dtype: torch.dtype,
    sets: Iterable[PromptSet | None],
    num_prompts: int,
    tokenizer: PreTrainedTokenizerBase,
) -> TowerDemand | None:
    """The demand of the images in the longest prompt that has any; None if none has.

    `config` is the model's. The images go through a tower of this shape whose numbers are not computed.
    """
    places = [(each.prompts, each.longest_with_images) for each in sets if each is not None]
    shown = [prompts[index] for prompts, index in places if index is not None]
    if not shown:
        return None
    longest = max(shown, key=lambda prompt: len(prompt.token_ids))
    with no_init_weights():
        tower = tower_class(config)._from_config(tower_config(config), dtype=dtype).eval().base_model
    reading, vectors = 0, 0
    for image in longest.images:
        inputs = processor_of(tokenizer).tensors(image)
        with torch.no_grad(), LiveBytes(hollow=True) as alive:
            encoded = read_image(tower, inputs, torch.device("cpu"))
        reading = max(reading, alive.peak + sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor)))
        vectors += encoded.num_bytes
    weights = sum(x.nbytes for x in (*tower.parameters(), *tower.buffers()))
    return TowerDemand(weights=weights, reading=reading, vectors=vectors, num_prompts=num_prompts)
