"""Training of the shipped models from the Python standard library's own source."""
