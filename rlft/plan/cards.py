"""GPUs that a run can be planned for without having one: their published rates, and the memory that CUDA reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    memory: int  # bytes that CUDA reports as its total: the driver and ECC keep the rest
    # With these the four passes that were measured on an H100 take 1.00 to 1.14 times the estimate.
    of_the_rate: float = 0.6
    of_the_bandwidth: float = 0.7


def _card(driver: str, gb: int, gib: float, tflops: float, gbps: float, *, is_compared: bool = False) -> Card:
    return Card(
        driver=driver,
        gb=gb,
        memory=int(gib * 2**30),
        rate=tflops * 1e12,
        bandwidth=gbps * 1e9,
        is_compared=is_compared,
    )


# Of each, as NVIDIA publishes them in the document named: TFLOPS of dense bfloat16 products with sums in float32 (half
# of those with sparsity), GB/s. No copy of the document was found for GH200, H100-PCIe, 3090 and A10: their rates
# are unconfirmed. GiB as CUDA reports them (the total in its messages): the least that was found, rounded down.
CARDS = {
    "B200": _card("NVIDIA B200", 180, 178.3, 2250, 8000),  # Blackwell datasheet, an eighth of HGX B200
    "GH200": _card("NVIDIA GH200 480GB", 96, 94.4, 989, 4000),  # GH200 datasheet, 96 GB HBM3; GiB from one report
    "H200": _card("NVIDIA H200", 141, 139.7, 989, 4800, is_compared=True),  # H200 datasheet, SXM
    "H100": _card("NVIDIA H100 80GB HBM3", 80, 79.1, 989, 3350, is_compared=True),  # H100 datasheet, SXM
    "H100-PCIe": _card("NVIDIA H100 PCIe", 80, 79.1, 756, 2000),  # H100 datasheet, PCIe
    "A100": _card("NVIDIA A100-SXM4-80GB", 80, 79.1, 312, 2040),  # A100 datasheet, 80 GB SXM
    "L40S": _card("NVIDIA L40S", 48, 44.3, 362, 864),  # L40S datasheet
    "5090": _card("NVIDIA GeForce RTX 5090", 32, 31.3, 209, 1792),  # RTX Blackwell architecture (fp16 sums: 838 sparse)
    "4090": _card("NVIDIA GeForce RTX 4090", 24, 23.5, 165, 1010),  # Ada architecture, appendix
    "3090": _card("NVIDIA GeForce RTX 3090", 24, 23.5, 71, 936),  # Ampere GA102 architecture; 35.6 without tensor cores
    "A10": _card("NVIDIA A10", 24, 22.0, 125, 600),  # A10 datasheet
    "L4": _card("NVIDIA L4", 24, 22.0, 121, 300),  # L4 datasheet
}
"""{name: GPU}. Others whose name has a part of these may be slower or smaller (RTX 4090 Laptop, A10G, A100-SXM4-40GB, a
MIG slice), so only whole names count."""
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
