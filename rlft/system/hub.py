"""Finds out quickly whether the Hugging Face hub can be reached: libraries retry for half a minute."""

from __future__ import annotations

import ssl
import threading
import urllib.error
import urllib.request
from functools import cache

PROBE_SECONDS = 4.0
"""Time limit for the hub's answer, in seconds. `datasets` and `transformers` would retry for 25 s or more."""


@cache
def hub_answers(seconds: float = PROBE_SECONDS) -> bool:
    """Whether the hub can be reached; any HTTP answer counts.

    The request runs in a thread, because name lookups have no time limit.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def probe() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=seconds).close()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError) as error:
            # Python does not trust the certificate, but a server did answer; the library will say more.
            if isinstance(getattr(error, "reason", None), ssl.SSLError):
                answered.set()
        else:
            answered.set()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()
