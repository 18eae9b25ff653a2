"""vLLM as an engine: in this process (`vllm_engine.py`), or as a server (`vllm_server.py`)."""
