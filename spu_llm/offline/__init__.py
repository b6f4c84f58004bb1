"""Correlated randomness: made ahead, kept, handed out once."""
