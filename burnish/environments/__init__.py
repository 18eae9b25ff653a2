"""State machines that turn completions into the next turn."""
