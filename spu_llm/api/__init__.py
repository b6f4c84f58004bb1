"""What callers use, in the order of the data; `spu_llm` has the names."""
