"""Generated tasks: endless rows with a checker, and train and test splits that cannot overlap."""
