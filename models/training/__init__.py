"""Training of the shipped models from the Python standard library's own source."""

from spu_llm.core.jax_settings import settle

settle()  # its modules run by `python -m`, and import JAX first
