"""Typed configuration: schema, loading, overrides, explaining, plug-ins. Never imports torch."""
