"""What each plan would read anew of embedded models."""

from base_read_once import base_read_once

__all__ = ["base_read_once"]
