"""A corpus of passages and multi-hop questions about it, generated from tables that pip packages carry."""
