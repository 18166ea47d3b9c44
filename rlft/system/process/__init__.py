"""Processes of a run: children, engines and ranks, here or on Ray."""
