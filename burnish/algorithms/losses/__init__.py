"""Losses as records, and the functions of slot `loss`."""
