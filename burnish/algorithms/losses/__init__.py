"""Slots `ratio`, `clip` and `loss`, and the losses of critics, reward models and preferences."""
