"""Optimizers, learning-rate schedules and checkpoints."""
