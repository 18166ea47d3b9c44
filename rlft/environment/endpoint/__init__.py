"""An HTTP endpoint with OpenAI's and vLLM's API over any engine, and agents that act through it."""
