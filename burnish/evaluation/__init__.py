"""Evaluation: accuracy with intervals, pass@k, maj@k, comparisons, and rejection sampling from completions."""
