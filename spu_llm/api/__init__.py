"""Typed calls: providers, clients, options, events, results; `spu_llm` exports their names."""
