"""Vault mode: the model owner's engine, a vault for each user, the user."""
