"""Adapters: classes written for TRL, verl, gymnasium, GEM, skyrl-gym, TextArena, OpenEnv and ScienceWorld, used unchanged."""
