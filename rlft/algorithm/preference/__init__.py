"""Losses of pairs."""
