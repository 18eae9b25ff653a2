"""Triton kernels. Each has an equivalent torch implementation next to its caller."""
