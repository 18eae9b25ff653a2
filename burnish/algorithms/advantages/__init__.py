"""Slot `advantage`: from rewards to advantages."""
