"""What is known of a run before a weight is loaded: its plan, memory, sizes, and rewards tried on prompts."""
