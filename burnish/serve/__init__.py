"""OpenAI-compatible server around an engine. It needs the extra `[serve]`."""
