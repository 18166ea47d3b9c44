"""Whether the Hugging Face hub can be reached, found out quickly: libraries that just try retry for half a minute."""

from __future__ import annotations

import ssl
import threading
import urllib.error
import urllib.request
from functools import cache

PROBE_SECONDS = 4.0
"""How long the hub may take to answer at all. `datasets` and `transformers` by themselves retry for 25 s and more."""


@cache
def hub_answers(seconds: float = PROBE_SECONDS) -> bool:
    """Whether the hub can be reached: any HTTP answer counts. A thread: a slow name server knows no limit."""
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
            # A certificate that Python's own store does not know: somebody did answer, the library will say more.
            if isinstance(getattr(error, "reason", None), ssl.SSLError):
                answered.set()
        else:
            answered.set()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()
