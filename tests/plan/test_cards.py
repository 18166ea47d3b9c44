"""Cards are known by the whole name that the driver gives them."""

from rlft.plan.cards import CARDS, NAMES


def test_cards_are_known_by_their_whole_names():
    assert set(NAMES.values()) == set(CARDS)
    for name in ("NVIDIA A10G", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD Instinct MI300X", "H100",
                 "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB", "mps", ""):  # fmt: skip
        assert name not in NAMES
