"""vLLM as an engine: in this process (`engine.py`), or as a server (`server.py`)."""
