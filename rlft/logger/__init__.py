"""Where the metrics of a run go, and what looks wrong in them."""
