"""Losses of preferences: one module for each YAML of configs/loss, pure functions of tensors."""
