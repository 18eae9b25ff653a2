"""Aggregation, KL, entropy and auxiliary terms of a loss."""
