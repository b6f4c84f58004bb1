"""Oblivious transfer and what is selected by it."""
