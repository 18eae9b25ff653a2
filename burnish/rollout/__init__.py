"""Sources of scored rollouts, and the runner that plays environments against an engine."""
