"""Environments: the protocol, token-exact dialogues, a game, and how to build one from the config."""
