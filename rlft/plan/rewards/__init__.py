"""Rewards and reference answers, tried before a run: all references, a few completions, and texts a policy may find."""
