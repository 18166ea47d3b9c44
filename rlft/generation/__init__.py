"""Engines that sample completions from the current policy."""
