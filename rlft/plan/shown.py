"""What a prompt shows of the environment, and whether the chat template can hold the environment's conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlft.environment.protocol import Environment
from rlft.types import NOTHING, Prompt, Shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def shown_in_prompts(
    environment: Environment | None, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> Shown:
    """What prompts show of the environment, for `rlft.data.prompts.scan`; nothing without one.

    Raises:
        UserError: a tool has no types or docstring, or the chat template cannot hold such conversations.
    """
    if environment is None or not len(prompts):
        return NOTHING
    from rlft.environment.dialect import Dialect
    from rlft.environment.turn_template import TurnTemplate

    if environment.plays_itself:
        TurnTemplate(tokenizer, {"user"}, opening=prompts[0].messages)
        return NOTHING
    return Dialect(environment, tokenizer, prompts[0].messages).shown
