"""The fast paths of the forward and of decoding; each gives what transformers and PEFT give."""
