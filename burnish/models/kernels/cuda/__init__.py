"""CUDA C++ for what Triton's tiles do not fit: compiled by NVIDIA's run-time compiler when first needed, kept for the next time."""
