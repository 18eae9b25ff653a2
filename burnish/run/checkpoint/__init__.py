"""Checkpoints: contents, background saving, retention."""
