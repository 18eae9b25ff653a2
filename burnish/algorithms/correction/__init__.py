"""Slot `correction`: rollout correction between the sampling and the trained policy."""
