"""Inference engines and weight synchronisation."""
