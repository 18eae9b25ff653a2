"""Data: rows from files and generated tasks, templates, resumable prompt streams, curation."""
