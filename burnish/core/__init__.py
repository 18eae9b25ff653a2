"""The types everything speaks: trajectories, ragged batches, segment operations, random keys, the engine protocol."""
