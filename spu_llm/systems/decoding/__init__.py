"""Text from a private model: standard decoding and POST."""
