"""Fixtures of completions to generate."""

from tests.systems.decoding.requests import small_blocks, tokenizer

__all__ = ["small_blocks", "tokenizer"]
