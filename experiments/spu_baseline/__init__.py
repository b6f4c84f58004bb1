"""Baseline: the work of this framework on SPU's own kernels."""
