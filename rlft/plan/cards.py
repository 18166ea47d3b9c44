"""Published rates of GPUs, by the names that their drivers report."""

from __future__ import annotations

from rlft.plan.roofline import Machine
from rlft.types import UserError

CARDS = {
    "H200": Machine(rate=989e12, bandwidth=4.8e12, is_compared=True),
    "H100": Machine(rate=989e12, bandwidth=3.35e12, is_compared=True),
    "A100": Machine(rate=312e12, bandwidth=2.04e12),
    "4090": Machine(rate=165e12, bandwidth=1.01e12),
    "L4": Machine(rate=121e12, bandwidth=0.30e12),
}
NAMES = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA GeForce RTX 4090": "4090",
    "NVIDIA L4": "L4",
}
"""{name: card}. Cards with a part of such a name may be slower (H100 PCIe, RTX 4090 Laptop, a MIG slice, L40S)."""


def card_named(name: str) -> str | None:
    """The card of CARDS that a driver calls `name`; None where no rates are known.

    >>> card_named("NVIDIA L4"), card_named("NVIDIA L40S"), card_named("NVIDIA H100 PCIe")
    ('L4', None, None)
    """
    return NAMES.get(name.strip())


def read_card(text: str) -> str:
    """The name in CARDS of a card that a command line names, in any case.

    >>> read_card("h100")
    'H100'

    Raises:
        UserError: no figures are known of it.
    """
    name = text.strip().upper().removeprefix("RTX").strip()
    if name not in CARDS:
        raise UserError("card", "no figures are known of this card", got=text, remedy=f"use {', '.join(CARDS)}")
    return name
