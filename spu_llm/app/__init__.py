"""The command line and the processes behind it; the only part of `spu_llm` that knows models."""
