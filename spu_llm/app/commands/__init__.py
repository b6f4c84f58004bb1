"""The commands of `spu-llm`: a file each, named after the command."""
