"""Health checks of a run."""
