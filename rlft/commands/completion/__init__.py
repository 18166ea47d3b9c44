"""`rlft completion`: what a shell offers at TAB, from a list in the user's cache folder."""
