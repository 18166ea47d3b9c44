"""How commands are run, and where."""

from ran_commands import here, ran

__all__ = ["here", "ran"]
