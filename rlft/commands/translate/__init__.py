"""What `rlft translate` reads of other libraries, and how it says the same here."""
