"""What is known of a model before its weights are loaded: by the family that it is of, and by its config.

families.json has what holds for each family of causal language models (`model_type` in config.json), as tiny random
models have shown. tests/model/write_families.py writes it with the newest transformers that is tested, and
tests/model/test_families.py tries every family again.

A config says how long a row may be, and the lengths at which attention begins to compute in another way. Some models
compute a row differently next to a longer one. `longrope` has other factors beyond `original_max_position_embeddings`,
and `dynamic` (NTK) grows its base beyond `max_position_embeddings`, for all rows of a batch with a longer one
(transformers' `dynamic_rope_update`); Llama 4 scales queries by their place in the batch, padding included, from
`floor_scale` on. Up to that length nothing of this has an effect, and rows are limited to it: beyond it, log-probs
would depend on the neighbours of a row, and those of a completion's first tokens on how long it will become. Up to it
vLLM computes the same, which takes longrope's long factors for every row of an engine whose longest row exceeds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models."""

    untried: str | None = None  # why it was not tried
    refused: str | None = None  # what a rule refuses such a model for
    wrong: str | None = None  # what was seen to be wrong with it in training
    decoding: str | None = None  # what was seen to be wrong with its decoding in the transformers engine
    # Why no choice of its experts can be imposed (`snapshot.routing`); None if it can, or it has none.
    routing: str | None = None
    adapted: str = ""  # the layers that `lora.target_modules: all-linear` adapts
    not_adapted: str = ""  # the layers that it leaves out
    padded: str | None = None  # why its rows are padded; None if they are packed
    exported: bool = False  # whether the model with the merged adapter computes what the adapter does
    vllm: bool | None = None  # whether vLLM serves adapters on it; None if it has no such model

    @property
    def is_trained(self) -> bool:
        return not (self.untried or self.refused or self.wrong)


class Families(NamedTuple):
    """{type of model: its family}, and the releases with which they were tried."""

    by_type: Mapping[str, Family]
    transformers: str
    vllm: str


@cache
def known() -> Families:
    """The content of families.json."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    by_type = {kind: Family(**fields) for kind, fields in read["families"].items()}
    return Families(by_type, read["transformers"], read["vllm"])


def recorded_family(*types: str) -> Family:
    """The family of the first of these types that was tried; an empty one if transformers is another minor release."""
    families = known()
    if families.transformers.split(".")[:2] == metadata.version("transformers").split(".")[:2]:
        for kind in types:
            if kind in families.by_type:
                return families.by_type[kind]
    return Family()


# -- lengths of rows ---------------------------------------------------------------------------------------------------
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Keys of config.json with a number of tokens beyond which attention is no longer to everything before a token."""


class Limit(NamedTuple):
    """The most tokens in a row, and words for it that complete "the model's"."""

    tokens: int
    words: str


def limit_of(model: PreTrainedConfig) -> Limit | None:
    """The longest row that this model computes, whatever is in its batch; None if its config.json sets no limit."""
    context = getattr(model.get_text_config(), "max_position_embeddings", None)
    limits = [] if context is None else [Limit(context, f"context of {context} tokens")]
    # of equal ones the first
    return min([*limits, *_limits_of_a_batch(model)], key=lambda limit: limit.tokens, default=None)


def independent_limit(model: PreTrainedConfig) -> Limit | None:
    """The limit up to which rows do not depend on the others of a batch; None if no row ever does."""
    return min(_limits_of_a_batch(model), key=lambda limit: limit.tokens, default=None)


def _limits_of_a_batch(model: PreTrainedConfig) -> Iterator[Limit]:
    text = model.get_text_config()
    words = "context of {} tokens, beyond which its {} makes a row depend on its neighbours"
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type") or rope.get("type"))
        tokens = getattr(text, "max_position_embeddings", None)
        if kind == "longrope":
            tokens = rope.get("original_max_position_embeddings") or tokens
        if tokens is not None and (kind == "longrope" or "dynamic" in kind):
            yield Limit(tokens, words.format(tokens, f"{kind} RoPE"))
    scaled_from = getattr(text, "floor_scale", None)
    if scaled_from and getattr(text, "attn_temperature_tuning", None):
        yield Limit(scaled_from - 1, words.format(scaled_from - 1, f"a floor_scale of {scaled_from}"))


def _rope_parameters(text: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of each RoPE: some models have one for each type of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]


def windows_of(model: PreTrainedConfig) -> list[int]:
    """The lengths in tokens of the model's attention windows and chunks, ascending."""
    text = model.get_text_config()
    return sorted({window for key in WINDOWS if isinstance(window := getattr(text, key, None), int)})


SHORT = 9  # tokens of the rows that are compared at other places than the beginning


def probed_beginnings(model: PreTrainedConfig) -> list[int]:
    """Positions of first tokens, ascending: SHORT tokens from there lie on both sides of a context from which RoPE was
    extended (`original_max_position_embeddings`), or at the end of the longest row.
    """
    limit = limit_of(model)
    if limit is None or limit.tokens <= SHORT:
        return []
    named = [rope.get("original_max_position_embeddings") for rope in _rope_parameters(model.get_text_config())]
    across = {length - SHORT // 2 for length in named if isinstance(length, int) and length > SHORT}
    return sorted({min(first, limit.tokens - SHORT) for first in (*across, limit.tokens)})
