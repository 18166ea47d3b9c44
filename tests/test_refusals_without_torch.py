"""What the config alone can tell is refused before torch and what stands on it are imported: in less than a second."""

from __future__ import annotations

from test_refusals import templates

__all__ = ["templates"]  # a fixture: the folder in which the rows are typed
