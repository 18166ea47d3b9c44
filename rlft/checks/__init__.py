"""What a config alone can tell is refused in less than a second: nothing here imports torch or what stands on it.

The same checks are made again, first of all, when the run is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlft.auto import resolved
from rlft.roots import Verb


def check_early(plain: Mapping[str, Any], verb: Verb, *, trains: bool = True) -> None:
    """Refuses what is wrong with a verb's plain config by itself, and local files that it names and that are not there.

    trains: False where a config of `rlft train` is only evaluated.

    Raises:
        UserError: with the key, what is wrong and what to do.
    """
    from functools import partial

    from rlft.checks import rm, sample, sft, train

    checks: Mapping[Verb, Callable[[Mapping[str, Any]], object]] = {
        Verb.train: partial(train.check_config, trains=trains),
        Verb.sft: sft.check_config,
        Verb.rm: rm.check_config,
        Verb.sample: sample.check_config,
    }
    checks[verb](resolved(plain, gpu=False))  # `auto` is never too small, wherever the base will be
