"""What becomes of an exported folder: pushed to the Hugging Face hub, or converted for llama.cpp."""
