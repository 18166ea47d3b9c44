"""Prints Hydra's answer to --help, --cfg and the like."""

from __future__ import annotations

import sys

from rlft.config import compose as configs
from rlft.config.overrides import Arguments


def ask(verb: str, parsed: Arguments) -> None:
    """Lets Hydra answer these words of a verb."""
    import hydra

    configs.register_resolvers()
    first, *others = configs.primary_folders(verb)
    search = [configs.search_path(others)] if others else []
    sys.argv = [f"rlft {verb}", *parsed.options, *configs.named_choices(parsed.overrides, verb), *search]
    try:
        hydra.main(config_path=str(first), config_name=verb, version_base="1.3")(lambda composed: None)()
    except Exception as error:
        raise configs.refusal(error, verb) or error from None
    except SystemExit as end:  # Hydra exits after --help
        if end.code:
            raise
