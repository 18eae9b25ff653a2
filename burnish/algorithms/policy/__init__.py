"""Slots `ratio` and `clip`."""
