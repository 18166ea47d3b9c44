"""rlft: fine-tune language models with reinforcement learning on the hardware you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlft.config.compose import load_algorithm as load_algorithm

__version__ = "0.1.0"
__all__ = ["load_algorithm", "main"]


def main() -> None:
    """The `rlft` command: from its first moment on, a signal ends it with a line and exit code 130."""
    from rlft.system import interrupt

    interrupt.end_the_process_on_signals()
    from rlft import cli

    cli.main()


def __getattr__(name: str) -> Any:
    # Late, so that `import rlft` (and every reward worker) stays free of Hydra and torch.
    if name == "load_algorithm":
        from rlft.config.compose import load_algorithm

        return load_algorithm
    raise AttributeError(f"module 'rlft' has no attribute '{name}'")
