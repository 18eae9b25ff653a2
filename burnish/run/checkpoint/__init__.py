"""Checkpoints: the snapshot of a run, saving it in the background, and which checkpoints are kept."""
