"""GPUs that a run can be planned for without having one: their published rates, and the memory that CUDA reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlft.system.files import asset
from rlft.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of a device, and the shares of them that large products and passes reach."""

    rate: float  # operations per second of dense products: of a GPU those published for bfloat16 with sums in float32
    bandwidth: float  # bytes per second
    # Seconds in which the host launches a kernel of an update, Python included, while a GPU computes earlier ones: what
    # was measured on one H100, whose host took 168 ms for the 2,201 kernels that are counted here of an update of 0.5B
    # (it launched 3,467: single calls of attention are several kernels).
    launch: float = 168e-3 / 2201
    of_the_rate: float = 0.7
    of_the_bandwidth: float = 0.8
    is_host: bool = False  # whether the host itself computes, so that its launches take time of their own
    is_compared: bool = False  # whether updates on it have been compared with this model


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Machine):
    """A GPU."""

    driver: str  # the name that its driver reports
    gb: int  # its memory by name, as in "A100 80GB"
    gib: float  # what CUDA reports as its total: the driver and ECC keep the rest
    # With these the four passes that were measured on an H100 take 1.00 to 1.14 times the estimate.
    of_the_rate: float = 0.6
    of_the_bandwidth: float = 0.7

    @property
    def memory(self) -> int:
        """The same in bytes."""
        return int(self.gib * 2**30)


CARDS = {name: Card(**published) for name, published in asset("cards.yaml").items()}
"""{name: GPU}."""
NAMES = {card.driver: name for name, card in CARDS.items()}  # {name that a driver reports: card}


def read_card(text: str) -> str:
    """The name in CARDS of a card that a command line names, however it is written; refuses others.

    >>> [read_card(text) for text in ("h100-sxm", "H100 PCIe", "RTX 4090", "rtx4090", "A100 80GB", "NVIDIA H200")]
    ['H100', 'H100-PCIe', '4090', '4090', 'A100', 'H200']
    """
    for name, card in CARDS.items():
        if _short(text) in (_short(card.driver), _short(name), f"{_short(name)}{card.gb}gb"):
            return name
    remedy = f"use {', '.join(CARDS)}, or leave it out and give device_memory=24GiB"
    raise UserError("card", "no figures are known of this card", got=text, remedy=remedy)


def _short(name: str) -> str:
    """The name in lower case and without the maker, the series, the socket and the kind of memory."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    kept = (word for word in words if not re.fullmatch(r"nvidia|geforce|tesla|sxm\d?|hbm\d?e?", word))
    return "".join(kept).removeprefix("rtx")
