"""`rlft audit of=trl|verl`: rewards, advantages, masks, ratios and losses of another trainer's run, recomputed."""
