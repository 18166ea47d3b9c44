"""Verbs that only read runs: runs, watch, diff, report."""
