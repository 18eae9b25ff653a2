"""Triton kernels of the operations a GPU does badly through torch; each has a torch twin beside its caller."""
