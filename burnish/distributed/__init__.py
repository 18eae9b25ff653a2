"""Builds the roles of a run (actor, reference, engine, rewards) from a config."""
