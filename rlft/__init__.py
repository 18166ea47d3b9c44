"""rlft: fine-tune language models with reinforcement learning on the hardware you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlft.config.compose import load_algorithm as load_algorithm

__version__ = "0.1.0"
__all__ = ["load_algorithm"]


def __getattr__(name: str) -> Any:
    # Late, so that `import rlft` (and every reward worker) stays free of Hydra and torch.
    if name == "load_algorithm":
        from rlft.config.compose import load_algorithm

        return load_algorithm
    raise AttributeError(f"module 'rlft' has no attribute '{name}'")
