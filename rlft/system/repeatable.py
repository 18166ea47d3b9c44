"""Sums in a fixed order, so that what is computed again has the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlft.system.lazy import torch


@contextmanager
def repeatable(*, only_warns: bool = False) -> Iterator[None]:
    """Inside, torch adds up in a fixed order what threads would otherwise add to the same number in any order.

    An operation that cannot do so raises, or warns. On a GPU the backward of flash attention has a fixed order only
    where such operations raise (`_flash_attention_backward` of torch 2.11).
    """
    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic  # a module whose attributes are properties
    was_filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=only_warns)
    settings.fill_uninitialized_memory = False  # that memory is never read, and filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        settings.fill_uninitialized_memory = was_filled
