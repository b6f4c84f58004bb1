"""Correlated randomness: made offline, kept, handed out once."""
