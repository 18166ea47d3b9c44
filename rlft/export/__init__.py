"""What follows an export: the model card, the push to the Hugging Face hub, and the conversion for llama.cpp."""
