"""Verifiers and the killable worker processes they run in."""
