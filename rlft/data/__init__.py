"""Where prompts, demonstrations, preferences and texts come from."""
