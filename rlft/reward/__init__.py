"""Rewards: a class or function that scores the completions of a group, `__call__(group) -> list[float]`."""
