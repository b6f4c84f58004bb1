"""The study of text with differential privacy (InvisibleInk)."""
