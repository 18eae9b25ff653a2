"""Kernels in C for operations on a CPU, each with a twin in torch."""
