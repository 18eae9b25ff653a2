"""Slot `correction`: rollout correction between the policy that samples and the one that is trained."""
