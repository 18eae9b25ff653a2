"""The native engine: continuous batching over a KV cache, on the learner's own weights."""
