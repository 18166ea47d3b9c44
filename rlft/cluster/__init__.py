"""Processes that share the work of a run: engines and ranks, on this machine or on the machines of a Ray cluster."""
