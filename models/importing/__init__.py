"""Model files of others into directories of the Hugging Face layout, which `models` reads."""
