"""The commands of `rlft`: one module for each."""
