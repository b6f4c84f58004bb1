"""Fixtures of completions to generate."""

from tests.systems.decoding.requests import tokenizer

__all__ = ["tokenizer"]
