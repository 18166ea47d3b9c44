"""Sweeps: `rlft train -m`."""
