"""Pure functions of tensors `[B, T]` in any float dtype, and of seeds, without model, tokenizer, config or device."""
