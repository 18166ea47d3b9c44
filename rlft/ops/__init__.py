"""Pure functions of tensors, and of seeds: no model, tokenizer, config or device in them. `[B, T]`, any float dtype."""
