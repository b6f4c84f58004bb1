"""One folder a system: its secure programs and its plaintext halves."""
