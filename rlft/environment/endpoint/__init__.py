"""An endpoint in the manner of OpenAI and vLLM over any engine, and agents that act through it."""
