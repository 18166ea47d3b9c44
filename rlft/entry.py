"""The entry point of the `rlft` command: from its first moment on, a signal ends it with a line and exit code 130."""

from __future__ import annotations

from rlft.system import interrupt


def main() -> None:
    interrupt.end_the_process_on_signals()
    from rlft import cli

    cli.main()
