"""Before a weight is loaded: rules that refuse, plans, and memory."""
