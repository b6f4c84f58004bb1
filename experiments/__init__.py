"""Reproductions, microbenchmarks and notebooks."""
