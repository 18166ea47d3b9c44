"""Pure functions of tensors: no model, tokenizer, config or device in them. `[B, T]` unless said, any float dtype."""
