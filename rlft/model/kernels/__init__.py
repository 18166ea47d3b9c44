"""The fast paths of the forward and of decoding; each gives the same numbers as transformers and PEFT."""
