"""Tensor operations of the learner and the native engine, with Triton, CUDA and C kernels."""
