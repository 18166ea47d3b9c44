"""`rlft doctor`: does rlft work on this machine? One file for each kind of row, and the process that makes them."""
