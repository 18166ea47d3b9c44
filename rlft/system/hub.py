"""Finds out quickly whether the Hugging Face hub can be reached: libraries retry for half a minute."""

from __future__ import annotations

import contextlib
import re
from functools import cache, partial
from pathlib import Path

from rlft.system.process.running_time import within

PROBE_SECONDS = 4.0
"""Time limit for the hub's answer, in seconds. `datasets` and `transformers` would retry for 25 s or more."""


def commit_of(path: str) -> str | None:
    """The newest commit of the model of this hub id, if need be the newest in the cache here; None if it is no such id,
    or there is none: loading says why."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or path.startswith(".") or Path(path).exists():
        return None
    from huggingface_hub import HfApi, try_to_load_from_cache

    if hub_answers():
        with contextlib.suppress(Exception):  # whatever a client raises, loading meets it again
            return HfApi().model_info(path).sha
    file = try_to_load_from_cache(path, "config.json")
    return Path(file).parent.name if isinstance(file, str) else None


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached; any HTTP answer counts. A thread asks: name lookups have no time limit."""
    from huggingface_hub import constants  # here, as most commands ask no hub
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        within(PROBE_SECONDS, partial(get_session().head, constants.ENDPOINT, timeout=PROBE_SECONDS))
    except Exception as error:  # of whatever client the library uses
        # Python does not trust the certificate, but a server did answer; the library will say more.
        return "SSL:" in str(error)
    return True
