"""Import of published model files into directories of the Hugging Face layout, for `models`."""
