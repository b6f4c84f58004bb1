"""Reproductions, microbenchmarks and notebooks."""

from spu_llm.core.jax_settings import settle

settle()  # its modules run by `python -m`, too, and import JAX first
