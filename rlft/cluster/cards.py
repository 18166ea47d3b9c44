"""The CUDA cards of this machine, which a run's own process and its other processes have."""

from __future__ import annotations

import os

import torch


def visible_cards() -> list[str]:
    """The cards that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [card.strip() for card in named.split(",") if card.strip()]
    return [str(card) for card in range(torch.cuda.device_count())]


def all_cards(own: torch.device) -> list[str]:
    """All of them, that of the run's own process first: as `Placement` counts them."""
    cards, index = visible_cards(), own.index or 0
    return [cards[index], *cards[:index], *cards[index + 1 :]]
