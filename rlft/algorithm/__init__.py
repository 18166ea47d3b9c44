"""Algorithms: `credit` turns rewards into advantages, `loss` turns advantages into a number to minimise."""
