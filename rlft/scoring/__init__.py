"""Scores groups: rewards are made from their config and called in worker processes with time limits."""
