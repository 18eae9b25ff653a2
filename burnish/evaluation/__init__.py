"""Accuracy with intervals, pass@k, completions kept."""
