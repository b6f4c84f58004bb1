"""Claims, measured."""
