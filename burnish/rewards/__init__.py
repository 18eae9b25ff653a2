"""Rewards: verifiers, users' functions, LLM judges, and the killable worker processes that run them."""
