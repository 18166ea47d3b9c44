"""What `rlft export` writes besides weights."""
