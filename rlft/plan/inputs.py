"""What a plan reads before it looks at its command's own data: the base's config, its tokenizer, and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlft.config.model import ModelConfig
from rlft.data.prompts import PromptSet, scan
from rlft.generation.stops import check_stops
from rlft.model.backbone import check_weights, ends_of, load_tokenizer, read_config
from rlft.plan.identity import fingerprints
from rlft.tokens.text import RunTokenizer
from rlft.types import NOTHING, Prompt, Shown, Split

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlft.tokens.ends import TurnEnds


def read_base(settings: ModelConfig) -> tuple[PreTrainedConfig, dict[str, str]]:
    """(its config, its fingerprints); its weights are found and not read."""
    model, base = read_config(settings), fingerprints(settings)
    check_weights(settings)
    return model, base


def read_tokenizer(config: Any, model: PreTrainedConfig) -> tuple[RunTokenizer, TurnEnds]:
    """(its tokenizer, what ends a turn) of a root with `model` and `prompts`; the stops of a root that samples fit."""
    tokenizer = load_tokenizer(config.model, config.prompts.template_variables)
    ends = ends_of(config.model, config.prompts.style, tokenizer)
    if hasattr(config, "generation"):
        check_stops(config.generation, tokenizer, model.get_text_config().vocab_size, ends.ids)
    return tokenizer, ends


def scan_prompts(
    config: Any, prompts: Sequence[Prompt], tokenizer: RunTokenizer, split: Split, shown: Shown = NOTHING
) -> PromptSet:
    """The prompts of a split, within the limits of the root's `prompts`; `shown`: what they show of an environment."""
    limits = config.prompts
    return scan(prompts, tokenizer, limits.max_tokens, limits.over_limit, split, limits.style, shown)
