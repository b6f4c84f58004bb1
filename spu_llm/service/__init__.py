"""Two machines agree on a program and run it: provider, client, workers."""
