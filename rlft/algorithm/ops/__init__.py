"""Pure functions of tensors, of which algorithms are composed."""
