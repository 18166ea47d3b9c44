"""Groups to scores: rewards made from their config and called in worker processes with time limits."""
