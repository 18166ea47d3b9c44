"""Every random number of a run derives from (seed, step, purpose), so that a resumed run draws the same ones."""

from __future__ import annotations

import hashlib


def derive(seed: int, step: int, purpose: str) -> int:
    """A number in [0, 2**48) for this purpose at this step. Equal arguments give equal numbers on every machine."""
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def sampling_seeds(seed: int, step: int, num_prompts: int, group_size: int, purpose: str = "sample") -> list[int]:
    """One seed per prompt, spaced by the group size: completion i of a prompt is sampled with its seed + i."""
    first = derive(seed, step, purpose)
    return [first + p * group_size for p in range(num_prompts)]
