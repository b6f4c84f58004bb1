"""Cost of parts: ops, products, verification, steps."""
