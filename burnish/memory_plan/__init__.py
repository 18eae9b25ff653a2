"""The memory a run needs on each device, computed before it starts."""
