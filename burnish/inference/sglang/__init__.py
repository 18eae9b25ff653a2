"""SGLang servers as an engine: an HTTP client of their native endpoints; nothing of SGLang is installed here."""
