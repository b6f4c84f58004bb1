"""Benchmarks of parts: ops, products, verification, steps, networks, connections."""
