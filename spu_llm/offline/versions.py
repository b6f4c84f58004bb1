"""Versions of what is prepared without SPU: in the labels of its public strings, and in manifests.

Apart from the protocols, so that whoever only states them need not load what they compute with.
"""

SILENT = "spu-llm silent product 2"
PACKED = "spu-llm packed product 3"
TRANSFERS = "spu-llm random transfers 1"
SLOTS = "spu-llm products in slots 1"
