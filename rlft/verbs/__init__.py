"""What follows `rlft` on the command line: a module a verb that makes or uses a model, and sweeps of them."""
