"""The vLLM engine: all that depends on the inside of vLLM."""
