"""What NOIR compares itself with: tokens replaced (T2T), embeddings noised (SnD)."""
