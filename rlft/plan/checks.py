"""Checks of a config by itself, which refuse within a second: nothing here imports torch or a library that needs it.

The same checks run again at the start of a run's plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.config import command as verbs
from rlft.config.compose import build
from rlft.config.token_budget import resolved
from rlft.plan import rules


def check_early(plain: Mapping[str, Any], verb: str) -> None:
    """Refuses a plain config that is wrong by itself, or that names local files which do not exist.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    chosen = verbs.named(verb)
    plain = resolved(plain, gpu=False)  # `auto` is never too small, wherever the base will be
    chosen.check(plain) if chosen.check is not None else build(plain, chosen.root, verb)
    if isinstance(model := plain.get("model"), Mapping):  # checked as written: a plan for another machine changes it
        rules.check_quantized_on(model.get("quantization"), str(model.get("device")))
