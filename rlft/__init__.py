"""rlft: fine-tune language models with reinforcement learning on the hardware you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlft.algorithm.objective import Objective

__version__ = "0.1.0"
__all__ = ["load_algorithm", "main"]


def main() -> None:
    """The `rlft` command: from its first moment on, a signal ends it with a line and exit code 130."""
    from rlft.system import interrupt

    interrupt.end_the_process_on_signals()
    from rlft import cli

    cli.main()


def load_algorithm(name: str, **overrides: Any) -> Objective:
    """The algorithm of configs/algorithm/<name>.yaml with these keys overridden; needs no model.

    >>> load_algorithm("grpo", clip_high=0.28).clip_high
    0.28
    """
    # Imported here so that `import rlft`, as in every reward worker, imports neither Hydra nor torch.
    from rlft.config.compose import compose
    from rlft.config.instantiate import instantiate

    return instantiate({**compose([f"algorithm={name}"])["algorithm"], **overrides}, "algorithm")
