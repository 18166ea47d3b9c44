"""Tokenises the data of a run: prompts, demonstrations, rankings and texts."""
