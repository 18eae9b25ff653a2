"""C kernels for CPUs. Each has an equivalent torch implementation."""
