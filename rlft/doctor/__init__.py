"""`rlft doctor`: does rlft work on this machine? Each kind of row has its own module; supervise runs the checks."""
