"""Private inference with large language models between two parties (SPU Cheetah, JAX)."""
