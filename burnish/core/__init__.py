"""Data types that every package shares: batches, trajectories, segment operations, random keys, engine and worker protocols."""
