"""On bits and words in boolean shares: gates, comparisons, selection, conversions."""
