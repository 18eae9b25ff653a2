"""CUDA C++ kernels, where Triton's tiles do not fit. NVRTC compiles them on first use, and the result is cached on disk."""
