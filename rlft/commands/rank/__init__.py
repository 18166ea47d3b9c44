"""`rlft rank`: a person ranks answers in a browser."""
