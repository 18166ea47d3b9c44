"""Untrusted programs run here."""
