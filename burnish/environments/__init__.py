"""Environments answer the model's completions: the protocol, token-exact dialogues, a guessing game, and the factory for the config."""
