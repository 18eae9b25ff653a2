"""Generated tasks: endless rows with a checker, and train and held-out sides that cannot overlap."""
