"""Test-time scaling: strategies that spend more tokens on a question and return one answer, on any engine, without the answer key."""
