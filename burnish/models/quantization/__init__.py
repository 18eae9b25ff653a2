"""Quantised weights and KV caches."""
