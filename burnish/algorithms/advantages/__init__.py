"""Slot `advantage`: rewards to advantages."""
