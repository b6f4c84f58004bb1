"""Speculative verification on shares: POST, and variants that open less."""
