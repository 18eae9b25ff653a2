"""A run on disk: directory, journal, metrics, samples, checkpoints, trackers, progress display."""
