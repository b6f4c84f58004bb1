"""The same work on SPU's own kernels."""
