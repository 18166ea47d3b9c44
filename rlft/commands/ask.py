"""Prints Hydra's answer to --help, --cfg and the like."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from rlft.config import compose as configs
from rlft.config.overrides import Arguments


def ask(verb: str, parsed: Arguments) -> None:
    """Lets Hydra answer these words of a verb."""
    import hydra

    configs.register_resolvers()
    first, *others = configs.primary_folders(verb)
    search = [configs.search_path(others)] if others else []
    words = [f"rlft {verb}", *parsed.options, *configs.named_choices(parsed.overrides, verb), *search]
    try:
        with command_line(words):
            hydra.main(config_path=str(first), config_name=verb, version_base="1.3")(lambda composed: None)()
    except Exception as error:
        raise configs.refusal(error, verb) or error from None
    except SystemExit as end:  # Hydra exits after --help
        if end.code:
            raise


@contextlib.contextmanager
def command_line(words: list[str]) -> Iterator[None]:
    """Has `sys.argv` be these words; afterwards it and the root logger, which Hydra configures, are as before."""
    root = logging.getLogger()
    argv, handlers, level = sys.argv, root.handlers[:], root.level
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = argv
        root.handlers[:] = handlers
        root.setLevel(level)
