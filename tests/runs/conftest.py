"""What is read once for all plans, and how commands are run."""

from base_read_once import base_read_once
from ran_commands import here, ran

__all__ = ["base_read_once", "here", "ran"]
