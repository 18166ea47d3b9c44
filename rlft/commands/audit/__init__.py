"""`rlft audit`: what of a run is confirmed, what cannot be, and what differs."""
