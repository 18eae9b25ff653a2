"""Rows in from files and built-in tasks, templates, stateful samplers."""
