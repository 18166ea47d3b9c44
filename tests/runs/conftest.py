"""What is read once for all plans, and how commands are run."""

from base_read_once import base_read_once
from ran_commands import ran

__all__ = ["base_read_once", "ran"]
