"""Marks in generated text that its key finds again."""
