"""What each of the three processes of vault mode learns: declared, and of exact sizes."""

from __future__ import annotations

from collections.abc import Sequence

from models.family import ModelConfig


def floats_per_layer(config: ModelConfig) -> int:
    """Return how many floats pass between engine and vault for a token and a layer: 2 d + 2 H,
    where d is the width of all query heads and H their number (the query; A, m and gamma).
    """
    heads = config.kv_heads * config.query_groups
    return 2 * heads * config.head_dim + 2 * heads


def learned(
    config: ModelConfig, prompts: Sequence[int], texts: Sequence[Sequence[int]]
) -> dict[str, list[str]]:
    """Return what each process learns. prompts: lengths, a lane each; texts: tokens after them."""
    # The last token of a text goes to nobody.
    steps = sum(max(0, len(text) - 1) for text in texts)
    asked = f"{steps} tokens x {config.layers} layers"
    heads = config.kv_heads * config.query_groups
    answers = f"{heads} heads x (A {config.head_dim}, m 1, gamma 1) of 32 bit"
    return {
        "user": [f"generated tokens: {sum(map(len, texts))}", "the model's shape and vocabulary"],
        "vault": [
            "the prompt, and all generated tokens: it is trusted with them",
            "all weights, once for each prefill: it is trusted not to keep them",
            f"queries q: {asked} of {heads} x {config.head_dim} x 32 bit",
            f"logits: {steps} tokens x {config.vocab_size} of 32 bit",
        ],
        "engine": [
            f"length of every prompt: {', '.join(map(str, prompts))} tokens",
            f"generated tokens but the last of a text: {steps}, at their positions",
            f"the prompt's attention: {asked}, {answers}; it determines the prompt's tokens",
            "when each text ends",
        ],
    }
