"""On words in additive shares: products, truncation, narrow words, caches."""
