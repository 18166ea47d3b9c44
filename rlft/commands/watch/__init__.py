"""Commands that only read runs."""
