"""Rewards in worker processes."""
