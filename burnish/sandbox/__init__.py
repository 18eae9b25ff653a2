"""Programs that nobody has read, run where they can do no harm: namespaces, limits, and a judge in another process."""
