"""vLLM in this process, or behind a server."""
