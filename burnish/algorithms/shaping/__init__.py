"""Slot `shaping`: reward shaping between the verifier and the advantages."""
